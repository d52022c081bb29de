"""A run directory: metadata, checkpoints, metrics, log."""
