"""Gives back to the system what loading a model has freed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

# From malloc.h: from which size on a piece of memory is mapped by itself, and how much of the heap
# may be free before it goes back.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_WHILE_LOADING = 1 << 20
_OTHERWISE = {
    _M_MMAP_THRESHOLD: ("MALLOC_MMAP_THRESHOLD_", 32 << 20),
    _M_TRIM_THRESHOLD: ("MALLOC_TRIM_THRESHOLD_", 256 << 20),
}
"""As Triton is started, or as its environment says."""


@contextmanager
def returned() -> Iterator[None]:
    """Have each large piece of memory go back to the system when it is freed.

    transformers widens the weights of experts one by one before it joins them. Otherwise what is
    freed of them would lie between what stays, and a model would take twice its weights.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None:
        # Not glibc.
        yield
        return
    change(_M_MMAP_THRESHOLD, _WHILE_LOADING)
    try:
        yield
    finally:
        # A pass allocates pieces of the same sizes again and again, and is faster from the heap.
        for parameter, (variable, usual) in _OTHERWISE.items():
            asked = os.environ.get(variable, "")
            change(parameter, int(asked) if asked.isdecimal() else usual)
