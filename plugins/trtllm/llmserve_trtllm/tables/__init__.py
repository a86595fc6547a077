"""The tensors and parameters of NVIDIA's templates, by model and by version, as data."""
