"""Exports a transformers model to one verified file that Triton's native backends run."""
