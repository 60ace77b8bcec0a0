"""A run's parts, without its loop."""
