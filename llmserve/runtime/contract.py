"""The contract, for plugins: tensors and options of every model, and names that processes share."""

from llmserve.lazy import lazy

__getattr__, __dir__ = lazy(__name__)
