"""From logits to text.

Letters in addition to those of `layers`: X columns of tokens, W beams, R rows of any kind, M = B T flattened tokens,
G tokens of a draft.
"""
