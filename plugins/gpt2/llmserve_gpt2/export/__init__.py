"""From a transformers model to one file that Triton's native backends run, checked first."""
