"""The stand-in for TensorRT-LLM's engine backend: the same tensors, with PyTorch behind them."""
