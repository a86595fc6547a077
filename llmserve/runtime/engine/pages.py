"""The pages of the cache: which are in use, and what finished sequences left in the others."""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator

START = 0
"""The content number that precedes the first page."""

_MOST_BEGINNINGS = 10_000

Key = tuple[int, tuple[int, ...]]
"""The number of the content before a full page, which is never reused, and the page's tokens, or
what else says what is in it."""


class PagePool:
    """Pages of ``page_size`` tokens each, held by any number of sequences.

    A page without a holder keeps its content until no empty page is left; then the least recently
    used ones are taken first. Those that are kept longer, as of sessions, go after all others. They
    are at most half of the pages: what is over goes before all others, so that neither can push the
    other out.
    """

    def __init__(self, count: int, page_size: int) -> None:
        self.count = count
        self.page_size = page_size
        self._empty = set(range(count))
        self._most_kept = count // 2
        self._surplus: OrderedDict[int, None] = OrderedDict()
        """Without a holder: what was kept longer, and was too much."""
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Without a holder, and kept no longer than others."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Without a holder, and kept longer."""
        self._longer: set[int] = set()
        """The pages that are kept longer, with and without a holder."""
        self._holders = [0] * count
        self._keys: dict[int, Key] = {}
        self._contents: dict[Key, tuple[int, int]] = {}
        self._content_numbers = itertools.count(START + 1)
        self._beginnings: dict[tuple[str, bytes], int] = {}

    @property
    def available(self) -> int:
        return len(self._empty) + sum(map(len, self._in_order))

    @property
    def _in_order(self) -> tuple[OrderedDict[int, None], ...]:
        """The pages without a holder that have a content: those are taken first that go first."""
        return self._surplus, self._unused, self._kept

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, previous: int = -1, *, longer: bool = False) -> int | None:
        """Return a page to write to, if there is one, preferably the one after ``previous``.

        A sequence in adjacent pages is read in place. One that is kept ``longer`` takes no content
        of others for that, once all that may be kept longer is.
        """
        page = previous + 1
        if previous < 0 or not self._is_to_spare(page, longer=longer):
            if self._empty:
                page = self._best_empty()
            elif order := next(filter(None, self._in_order), None):
                page = next(iter(order))
            else:
                return None
        if page in self._empty:
            self._empty.remove(page)
        else:
            self._hold(page)
            self._longer.discard(page)
            del self._contents[self._keys.pop(page)]
        self._holders[page] = 1
        return page

    def _is_to_spare(self, page: int, *, longer: bool) -> bool:
        if page in self._empty or page in self._surplus:
            return True
        is_full = bool(self._surplus) or len(self._longer) >= self._most_kept
        return page in self._unused and not (longer and is_full)

    def _hold(self, page: int) -> None:
        for order in self._in_order:
            order.pop(page, None)

    def _best_empty(self) -> int:
        """Return the longest empty run's start, or its middle if a sequence may grow into it."""
        longest, start, end = (0, 0), -1, -1
        for page in sorted(self._empty):
            start, end = start if page == end else page, page + 1
            longest = max(longest, (end - start, -start))
        length, start = longest[0], -longest[1]
        shared = start > 0 and self._holders[start - 1]
        return start + (length // 2 if shared else 0)

    def release(self, pages: Iterable[int], *, longer: bool = False) -> None:
        """Release a sequence's pages, given in their order; keep their content ``longer``."""
        # The end of a sequence is useful to fewer others than its beginning, so it goes first.
        for page in reversed(list(pages)):
            if longer and page in self._keys:
                self._longer.add(page)
            self._holders[page] -= 1
            if not self._holders[page]:
                if page not in self._keys:
                    self._empty.add(page)
                elif page in self._longer:
                    self._kept[page] = None
                else:
                    self._unused[page] = None
        while len(self._kept) > self._most_kept:
            page, _ = self._kept.popitem(last=False)
            self._longer.remove(page)
            self._surplus[page] = None

    def publish(self, page: int, previous: int, ids: tuple[int, ...]) -> int:
        """Let other sequences share a full page; return the number of its content."""
        key = previous, ids
        # Another sequence may have computed the same content in the same step.
        if key not in self._contents:
            self._keys[page] = key
            self._contents[key] = page, next(self._content_numbers)
        return self._contents[key][1]

    def beginning(self, adapter: str, salt: str = "") -> int:
        """Return the number that precedes the first page: what is computed with one adapter is of
        no use to those with another, and no salt shares with another."""
        if not (adapter or salt):
            return START
        # Of a salt, which may have any length, only a digest is kept.
        key = adapter, hashlib.sha256(salt.encode()).digest()
        number = self._beginnings.pop(key, 0) or next(self._content_numbers)
        self._beginnings[key] = number
        if len(self._beginnings) > _MOST_BEGINNINGS:
            # Who begins so again only computes again.
            del self._beginnings[next(iter(self._beginnings))]
        return number

    def contents(self, ids: list[int], content: int = START) -> list[int]:
        """Return the numbers of the contents of the pages that the ids begin with."""
        return [number for _, number in self._matches(ids, content)]

    def share(self, ids: list[int], content: int = START) -> tuple[list[int], int]:
        """Hold the pages that the ids begin with, after a content; return them and the number of
        the last content."""
        pages = []
        for page, number in self._matches(ids, content):
            content = number
            self._holders[page] += 1
            self._hold(page)
            pages.append(page)
        return pages, content

    def _matches(self, ids: list[int], content: int) -> Iterator[tuple[int, int]]:
        for start in range(0, len(ids) - self.page_size + 1, self.page_size):
            match = self._contents.get((content, tuple(ids[start : start + self.page_size])))
            if match is None:
                return
            yield match
            content = match[1]
