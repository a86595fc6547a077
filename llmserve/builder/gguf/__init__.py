"""Models in GGUF files: what a file says of itself, and its conversion to a model's folder."""
