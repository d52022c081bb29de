"""Compile a training step ahead of time and estimate its memory, collectives and speed."""
