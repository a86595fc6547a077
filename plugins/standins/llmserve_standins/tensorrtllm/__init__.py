"""TensorRT-LLM's engine backend, imitated: the same tensors, answered with PyTorch."""
