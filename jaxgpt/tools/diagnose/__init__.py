"""Repeat a training step alone."""
