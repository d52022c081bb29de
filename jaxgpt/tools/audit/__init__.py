"""Check that the numbers of a run are those of its experiment."""
