"""The parts of gpu.py: a file has the checks of one part, each of which yields rows of the table."""
