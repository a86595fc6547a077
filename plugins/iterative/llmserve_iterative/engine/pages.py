"""Which sequence holds which page of the cache, and what finished ones leave in them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable

START = 0
"""What stands before the first page."""

Key = tuple[int, tuple[int, ...]]
"""A full page's tokens, behind the number of the content before them, which is never used again."""


class PagePool:
    """Pages of ``page_size`` tokens each, held by any number of sequences.

    A page that nobody holds keeps its content until the pages that have none are used up; then
    those not used for longest are taken first.
    """

    def __init__(self, count: int, page_size: int) -> None:
        self.count = count
        self.page_size = page_size
        self._empty = set(range(count))
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * count
        self._keys: dict[int, Key] = {}
        self._contents: dict[Key, tuple[int, int]] = {}
        self._numbers = itertools.count(START + 1)

    @property
    def available(self) -> int:
        return len(self._empty) + len(self._unused)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, behind: int = -1) -> int | None:
        """Return a page for the caller to write to, if there is one: the next behind another's.

        A sequence that lies in one piece is read in place.
        """
        page = behind + 1
        if behind < 0 or not (page in self._empty or page in self._unused):
            if self._empty:
                page = self._roomiest()
            elif self._unused:
                page = next(iter(self._unused))
            else:
                return None
        if page in self._unused:
            del self._unused[page]
            del self._contents[self._keys.pop(page)]
        else:
            self._empty.remove(page)
        self._holders[page] = 1
        return page

    def _roomiest(self) -> int:
        """Return an empty page with others behind it, and some before it for who grows there."""
        best, start, end = (0, 0), -1, -1
        for page in sorted(self._empty):
            start, end = start if page == end else page, page + 1
            best = max(best, (end - start, -start))
        length, start = best[0], -best[1]
        grows = start > 0 and self._holders[start - 1]
        return start + (length // 2 if grows else 0)

    def release(self, pages: Iterable[int]) -> None:
        """Let go of a sequence's pages, in their order."""
        # The end of a sequence is of use to fewer others than its beginning, so it goes first.
        for page in reversed(list(pages)):
            self._holders[page] -= 1
            if not self._holders[page]:
                if page in self._keys:
                    self._unused[page] = None
                else:
                    self._empty.add(page)

    def publish(self, page: int, before: int, ids: tuple[int, ...]) -> int:
        """Let others share a full page; return the number of its content."""
        key = before, ids
        # Somebody else may have computed the same at the same time.
        if key not in self._contents:
            self._keys[page] = key
            self._contents[key] = page, next(self._numbers)
        return self._contents[key][1]

    def share(self, ids: list[int]) -> tuple[list[int], int]:
        """Hold the pages that the ids begin with; return them and the last content's number."""
        pages, before = [], START
        for start in range(0, len(ids) - self.page_size + 1, self.page_size):
            found = self._contents.get((before, tuple(ids[start : start + self.page_size])))
            if found is None:
                break
            page, before = found
            self._holders[page] += 1
            self._unused.pop(page, None)
            pages.append(page)
        return pages, before
