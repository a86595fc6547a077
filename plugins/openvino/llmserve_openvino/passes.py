"""What a pass of a converted model is given: the rows of its chunks, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from llmserve.runtime import Chunk

PAGE_SIZE = 32
"""The only size of a page that OpenVINO has on a CPU."""
NEEDED = "llmserve_needed_rows"
"""The input that names the rows whose scores are computed."""


class _Rows(NamedTuple):
    """The rows of a chunk."""

    ids: list[int]
    positions: Sequence[int]
    start: int
    pages: Sequence[int]
    needed: range
    """Those whose scores are needed."""
    adapter: str

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


class Pass:
    """The rows of a pass.

    With a ``spare`` page, no chunk has a single row, nor does a product: OpenVINO computes one row
    in another way than several, in attention and, in float32, in products. Of several, each is
    computed as if it were alone. So a single token is given twice, at the same position. No other
    row sees the second one: its place in the cache is that of the next token, which is written
    later, or in the spare page.
    """

    def __init__(self, chunks: Sequence[Chunk], spare: int | None = None) -> None:
        rows = [_rows(chunk, spare) for chunk in chunks]
        begins = [0, *accumulate(len(each.ids) for each in rows)]
        needed = [
            begin + row for begin, each in zip(begins, rows, strict=False) for row in each.needed
        ]
        self.begins = begins
        """Where each chunk's rows begin, and where the last one's end."""
        self.rows = len(needed)
        """How many rows of scores are needed."""
        self.adapters = [each.adapter for each in rows for _ in each.ids]
        """The key of each row's adapter."""
        # A pass of which no row is needed computes one.
        needed = needed or [0]
        if spare is not None and len(needed) == 1:
            needed *= 2
        self.inputs: dict[str, Any] = {
            "input_ids": np.array([token for each in rows for token in each.ids], np.int64),
            "position_ids": np.concatenate([np.array(each.positions, np.int64) for each in rows]),
            "past_lens": np.array([each.start for each in rows], np.int32),
            "subsequence_begins": np.array(begins, np.int32),
            "block_indices": np.array([page for each in rows for page in each.pages], np.int32),
            "block_indices_begins": np.array(
                [0, *accumulate(len(each.pages) for each in rows)], np.int32
            ),
            "max_context_len": np.array(max(each.stop for each in rows), np.int32),
            NEEDED: np.array(needed, np.int64),
        }


def _rows(chunk: Chunk, spare: int | None) -> _Rows:
    count = len(chunk.ids)
    pages = chunk.pages[: -(-chunk.stop // PAGE_SIZE)]
    needed = range(count - chunk.rows, count)
    positions: Sequence[int] = range(chunk.start, chunk.stop)
    ids = chunk.ids
    if spare is not None and count == 1:
        ids, positions = ids * 2, [chunk.start, chunk.start]
        if chunk.stop % PAGE_SIZE == 0:
            pages = [*pages, spare]
    return _Rows(ids, positions, chunk.start, pages, needed, chunk.adapter)
