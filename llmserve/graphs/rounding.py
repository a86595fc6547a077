"""Rounds weights to 4 and 8 bits, a piece of the rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from llmserve.errors import UnservedError
from llmserve.graphs.packed_weight import Kind, PackedWeight, packed

_Tell: TypeAlias = Callable[[float], None]
Empty: TypeAlias = Callable[[tuple[int, ...], Any], Any]
"""Makes an array of a shape and a type, to be filled."""
# How many numbers are computed at once: what that takes stays in a processor's cache.
_PIECE = 1 << 17
_HIGHEST = {"u4": 15, "u8": 255}
_STRETCHES = {"u4": (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0), "u8": (0.0,)}
"""By how many steps a range is made longer; what is beyond it becomes its end.

With 4 bits, a few numbers that are cut off may cost less than larger steps for all.
"""
_SMALLEST_GROUP = 16
_LEAST = 1e-3
"""How much each column counts at least, as a share of the mean."""
_TINY = 1e-30


@dataclass(frozen=True)
class _Rounded:
    """Groups of numbers as whole ones, ``(whole - zero) * scale``; the whole ones are signed."""

    differences: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor


def rounded(
    weight: torch.Tensor,
    kind: Kind,
    group: int,
    importance: torch.Tensor | None = None,
    tell: _Tell = lambda _: None,
    empty: Empty = np.empty,
) -> PackedWeight:
    """Round a matrix to whole numbers, of which each group along a row has a scale and a zero.

    Those are chosen that have the smallest sum of squared errors among a few. ``weight`` may be of
    any type and layout; ``importance`` says how much an error in each column counts. ``empty``
    makes the arrays that are filled, such as in a file.
    """
    rows, width = weight.shape
    groups = width // group
    integers = empty((rows, width // 2 if kind == "u4" else width), np.uint8)
    scales = empty((rows, groups), np.float32)
    zeros = empty((rows, groups), np.uint8)
    counts = _counts(importance, width).view(groups, group)
    step = max(1, _PIECE // width)

    def round_rows(start: int) -> int:
        part = slice(start, min(start + step, rows))
        values = weight[part].float().reshape(-1, groups, group)
        found = _fitted(values, counts, _HIGHEST[kind], _STRETCHES[kind])
        whole = (found.differences + found.zeros).to(torch.uint8).numpy().reshape(-1, width)
        integers[part] = packed(whole) if kind == "u4" else whole
        scales[part] = found.scales.squeeze(-1).numpy()
        zeros[part] = found.zeros.squeeze(-1).to(torch.uint8).numpy()
        return part.stop

    with _pieces_at_once() as pool:
        for done in pool.map(round_rows, range(0, rows, step)):
            tell(done / rows)
    return PackedWeight(kind, integers, group, scales, zeros)


@contextmanager
def _pieces_at_once() -> Iterator[ThreadPoolExecutor]:
    """Return threads that compute a piece each, as many as torch would share one among.

    An operation on a piece takes less than its threads would wait for one another.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _counts(importance: torch.Tensor | None, width: int) -> torch.Tensor:
    if importance is None or not importance.isfinite().all() or not importance.any():
        return torch.ones(width)
    # What was zero for one text is not for others.
    return importance.clamp(min=_LEAST * float(importance.mean()))


def whole_group(width: int, largest: int) -> int | None:
    """Return the largest even group that rows consist of, None if it would be too small."""
    for group in range(min(largest, width), _SMALLEST_GROUP - 1, -1):
        if width % group == 0 and group % 2 == 0:
            return group
    return None


def _fitted(
    values: torch.Tensor, counts: torch.Tensor, highest: int, stretches: tuple[float, ...]
) -> _Rounded:
    """Round groups with what has the smallest squared error, in which columns count differently."""
    # Zero stays zero.
    low = values.amin(-1, keepdim=True).clamp_(max=0)
    length = values.amax(-1, keepdim=True).clamp_(min=0) - low
    if not length.isfinite().all():
        raise UnservedError("a weight has values that are no finite numbers")
    length.clamp_(min=_TINY)
    best = torch.full_like(low, -1.0)
    scales, zeros = torch.ones_like(low), torch.zeros_like(low)
    for stretch in stretches:
        inverse = (highest + stretch) / length
        zero = (-low * inverse - stretch / 2).round_().clamp_(0, highest)
        differences = _clamped(values * inverse, zero, highest)
        scale, gain = _least_squares(values, differences, counts)
        is_better = gain > best
        torch.where(is_better, gain, best, out=best)
        torch.where(is_better, scale, scales, out=scales)
        torch.where(is_better, zero, zeros, out=zeros)
    # Other numbers may be nearer with that scale, which is fitted to them.
    scales[scales == 0] = 1
    differences = _clamped(values / scales, zeros, highest)
    scales, _ = _least_squares(values, differences, counts)
    scales[scales == 0] = 1
    differences = _clamped(values / scales, zeros, highest)
    return _Rounded(differences, zeros, scales)


def _clamped(scaled: torch.Tensor, zeros: torch.Tensor, highest: int) -> torch.Tensor:
    """Return the nearest whole numbers, as differences from zero points."""
    return torch.minimum(torch.maximum(scaled.round_(), -zeros), highest - zeros)


def _least_squares(
    values: torch.Tensor, differences: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best scale for each group, and by how much it lessens the squared error."""
    counted = differences * counts
    together = torch.linalg.vecdot(values, counted).unsqueeze(-1)
    alone = torch.linalg.vecdot(differences, counted).unsqueeze(-1).clamp_(min=_TINY)
    scale = together / alone
    return scale, scale * together
