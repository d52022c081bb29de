"""Repeat one training step of a run."""
