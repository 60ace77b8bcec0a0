"""Public checkpoints, in and out."""
