"""Measure how good a run is: its loss on text, and the tasks of lm-evaluation-harness."""
