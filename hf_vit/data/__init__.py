"""Images: sources, splits, decoding, batches, augmentation. Knows no model."""
