"""In-flight decoding of many sequences in one process.

:class:`Engine` owns the sequences and their room in the cache, a runner turns tokens into
logits, and everything a request sees happens in its ``Generation``.
"""

from llmserve_iterative.engine.engine import Engine, Progress

__all__ = ["Engine", "Progress"]
