"""Train variants of an experiment with several seeds and compare them."""
