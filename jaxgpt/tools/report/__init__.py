"""Summarise a run as a page."""
