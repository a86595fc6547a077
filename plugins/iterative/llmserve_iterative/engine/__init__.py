"""Decoding many sequences at once, with a paged cache of keys and values.

:class:`Engine` is what drivers see. The :class:`~llmserve_iterative.engine.scheduler.Scheduler`
says what each step computes, a runner computes it, and ``PagePool`` keeps the books of the cache.
"""

from llmserve_iterative.engine.engine import Engine

__all__ = ["Engine"]
