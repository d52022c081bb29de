"""Compile a training step ahead of time and read its memory, collectives and speed."""
