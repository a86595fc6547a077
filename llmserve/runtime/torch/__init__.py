"""What needs PyTorch or transformers: a tokenizer, linear layers."""
