"""A runner without a transformer, for tests of the engine: its model's scores depend on all tokens.

Its cache holds, for each token, a number made of that token and all before it. If the engine mixed
up pages, positions or rows, the scores would be others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmserve.runtime import ArrayLogits, Chunk, Embedded

VOCABULARY = 50
_MODULUS = 1_000_003


class RecallRunner:
    def __init__(self, page_count: int = 16, page_size: int = 4, *, noise: float = 0.0) -> None:
        self.page_count, self.page_size, self.accepts_runs = page_count, page_size, True
        self._noise = noise
        self._cache = np.full((page_count, page_size), -1)
        self.passes: list[list[Chunk]] = []
        self.fail_next = False

    @property
    def page_form(self) -> str:
        return str(self._cache.dtype)

    def read_page(self, page: int) -> bytes:
        return bytes(self._cache[page].tobytes())

    def write_page(self, page: int, content: bytes) -> bool:
        if len(content) != self._cache[page].nbytes:
            return False
        self._cache[page] = np.frombuffer(content, self._cache.dtype)
        return True

    def run(self, chunks: Sequence[Chunk]) -> ArrayLogits:
        assert all(chunk.ids for chunk in chunks)
        singles = [chunk.single for chunk in chunks]
        assert singles == sorted(singles, reverse=True)
        self.passes.append(list(chunks))
        rows = [row for chunk in chunks for row in self._rows(chunk)]
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the pass failed")
        return ArrayLogits(np.array(rows, dtype=np.float32).reshape(-1, VOCABULARY))

    def _rows(self, chunk: Chunk) -> list[npt.NDArray[np.float64]]:
        numbers = []
        for position, token in enumerate(read(chunk), chunk.start):
            before = self._cache[self._place(chunk, position - 1)] if position else 1
            assert before >= 0, "nothing was written there"
            numbers.append((int(before) * 31 + token + 7) % _MODULUS)
            self._cache[self._place(chunk, position)] = numbers[-1]
        return [
            scores(number) + self._noise * scores(number + 1)
            for number in numbers[len(numbers) - chunk.rows :]
        ]

    def _place(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.pages[position // self.page_size], position % self.page_size


class RecallingRunner(RecallRunner):
    """Keeps one number for each sequence, a state, and as hybrids do one for each token as well."""

    def __init__(
        self, page_count: int = 16, *, most_copies: int = 0, has_pages: bool = True
    ) -> None:
        super().__init__(page_count)
        self.has_pages = has_pages
        self.accepts_runs = False
        self.most_copies = most_copies
        self.states: dict[int, tuple[int, int]] = {}
        """Of each, how many tokens are in it, and the number made of them."""

    def read_page(self, page: int) -> bytes:
        return super().read_page(page) if self.has_pages else b""

    def copy(self, state: int, copy: int) -> None:
        assert copy not in self.states
        self.states[copy] = self.states[state]

    def forget(self, state: int) -> None:
        self.states.pop(state, None)

    def read_state(self, state: int) -> bytes:
        return bytes(np.array(self.states[state]).tobytes())

    def write_state(self, state: int, content: bytes) -> bool:
        if len(content) != 2 * np.dtype(int).itemsize:
            return False
        count, number = np.frombuffer(content, int)
        self.states[state] = int(count), int(number)
        return True

    def _rows(self, chunk: Chunk) -> list[npt.NDArray[np.float64]]:
        count, number = self.states[chunk.state] if chunk.start else (0, 1)
        assert count == chunk.start, "the state is of other tokens"
        if self.has_pages and count:
            assert number == self._cache[self._place(chunk, count - 1)], "another's page"
        rows = []
        for position, token in enumerate(read(chunk), count):
            number = (number * 31 + token + 7) % _MODULUS
            self._cache[self._place(chunk, position)] = number
            rows.append(scores(number))
        self.states[chunk.state] = chunk.stop, number
        return rows[len(rows) - chunk.rows :]


def embedded(start: int, count: int, image: int, *, is_whole: bool = False) -> Embedded:
    """Return tokens that stand for an image, of which each has a number of its own."""
    numbers = [1000 + 97 * image + place for place in range(count)]
    return Embedded(start, count, f"{image} {count}".encode(), numbers, is_whole)


def read(chunk: Chunk) -> list[int]:
    """Return the tokens of a chunk, or what they stand for."""
    found = list(chunk.ids)
    for each in chunk.embedded:
        first, stop = max(each.start, chunk.start), min(each.stop, chunk.stop)
        assert first < stop, "it is not of this chunk"
        assert stop == each.stop or not each.is_whole, "its tokens do not see those that follow"
        numbers = each.source[first - each.start : stop - each.start]
        found[first - chunk.start : stop - chunk.start] = numbers
    return found


def scores(number: int) -> npt.NDArray[np.float64]:
    row: npt.NDArray[np.float64] = 3 * np.sin(number * np.arange(1, VOCABULARY + 1) * 0.7)
    return row
