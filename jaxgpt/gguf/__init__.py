"""Write models as GGUF, the format of llama.cpp, and read them back."""
