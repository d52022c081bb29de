"""Scaling laws: train a ladder of sizes, fit the loss over parameters and tokens, predict a larger run, train it."""
