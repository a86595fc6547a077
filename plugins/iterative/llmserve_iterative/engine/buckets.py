"""How many rows a pass is made for: few different numbers, however many tokens there are."""

from __future__ import annotations

_FINE = 16


def bucket(rows: int) -> int:
    """Return the next size that passes are made for, at most an eighth above.

    oneDNN compiles a kernel for each number of rows that it meets and keeps half of what that
    takes (0.6 MB per shape of weight) for ever, whatever its cache is limited to. Compiling
    takes as long as several products of that size, too.

    >>> [bucket(rows) for rows in (1, 16, 17, 33, 64, 65, 257)]
    [1, 16, 18, 36, 64, 72, 288]
    """
    step = max(1, (1 << (rows - 1).bit_length()) // _FINE)
    return -(-rows // step) * step
