"""Compare variants of an experiment, and curves with earlier ones."""
