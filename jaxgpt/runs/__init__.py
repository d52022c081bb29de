"""The run directory: metadata, checkpoints, metrics, log."""
