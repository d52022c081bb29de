"""Convert models to and from Hugging Face's format and GGUF."""
