"""Convert models from and to Hugging Face's format."""
