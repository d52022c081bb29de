"""Hugging Face's formats: configurations, weights, tokenizers, the Hub."""
