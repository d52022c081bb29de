"""Show the activations of a model on one text, as a page."""
