"""List all runs below a directory. Imports no jax, so that hundreds are listed in less than a second."""
