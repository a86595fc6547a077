"""Text that arrives in pieces, with lines that end between words."""

from __future__ import annotations

import re
from collections.abc import Callable

_WORDS = re.compile(r"\n|[^\S\n]+|\S+")
_LONGEST = 30
"""Characters without a space that are passed on as they come, as of an address."""


class WordWrap:
    """Passes text on word by word, and begins a new line where the next one would not fit.

    >>> lines = []
    >>> wrap = WordWrap(lines.append, columns=lambda: 12)
    >>> wrap.write("one two th"), wrap.write("ree four"), wrap.end()
    (None, None, None)
    >>> "".join(lines)
    'one two\\nthree four'
    """

    def __init__(
        self,
        write: Callable[[str], None],
        columns: Callable[[], int],
        width: Callable[[str], int] = len,
    ) -> None:
        self._write, self._columns, self._width = write, columns, width
        self._column = 0
        self._gap = ""
        self._word = ""

    def write(self, text: str) -> None:
        """Pass text on, except a word at its end, which may go on, and the space before it."""
        *words, last = _WORDS.findall(self._word + text) or [""]
        self._word = last if last and not last.isspace() and len(last) < _LONGEST else ""
        if line := "".join(map(self._placed, [*words, *([] if self._word else [last])])):
            self._write(line)

    def end(self) -> None:
        """Pass on the last word."""
        if self._word:
            self._write(self._placed(self._word))
        self._word = self._gap = ""

    def _placed(self, word: str) -> str:
        """Return a word with what comes before it: the space, or a new line."""
        if word.isspace() and word != "\n":
            self._gap += word
            return ""
        gap, self._gap = self._gap, ""
        if word == "\n":
            self._column = 0
            return word
        columns = max(1, self._columns())
        # Without a gap, it goes on with a long word whose beginning was passed on.
        if gap and self._column and self._column + self._width(gap + word) > columns:
            gap, self._column = "\n", 0
        self._column += self._width(gap.lstrip("\n") + word)
        if self._column > columns:
            # The terminal has broken a word that is longer than a line.
            self._column = (self._column - 1) % columns + 1
        return gap + word
