"""Large tensors of zeros, in memory that is quick to reach."""

from __future__ import annotations

import contextlib
import mmap

import torch


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros, which take up memory only where something is written.

    Decoding reads short stretches from all over the cache. With ordinary pages, finding each
    costs more than reading it, so on a CPU the system is asked for huge ones.
    """
    huge = getattr(mmap, "MADV_HUGEPAGE", None)
    if device.type != "cpu" or huge is None:
        return torch.zeros(*shape, dtype=dtype, device=device)
    count = 1
    for length in shape:
        count *= length
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel that was built without them says so; the memory is good all the same.
    with contextlib.suppress(OSError):
        pages.madvise(huge)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
