"""Search for the best values of an experiment's fields by successive halving."""
