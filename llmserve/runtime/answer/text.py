"""Converts a stream of tokens to text: whole characters only, and without stop words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
_CONTEXT = 6
# A character has at most four bytes, so a longer run of undecodable ones stays undecodable.
_MAX_CHARACTER = 4
_MAX_WAIT = 16


class IncrementalDecoder:
    """Decodes token by token so that the pieces join to exactly the whole text.

    A token alone has no text: it may contain part of a character, and its leading space may depend
    on the tokens before it. So each step decodes a window that begins with tokens already returned,
    and returns the text that the window gained. An unfinished character at the end waits for the
    next token.

    >>> decoder = IncrementalDecoder(lambda ids: bytes(ids).decode(errors="replace"))
    >>> [decoder.push(byte) for byte in "é!".encode()]
    ['', 'é', '!']
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        # The end of the prompt is enough context for the first token's leading space.
        self._decode = decode
        self._window = list(context)[-_CONTEXT:]
        self._emitted = len(self._decode(self._window)) if self._window else 0
        self._borders = [0, len(self._window)]

    def push(self, *token_ids: int) -> str:
        """Add the next token, or several at once, and return the text that is now certain."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        if len(text) - len(certain) > _MAX_WAIT:
            certain = text[:-_MAX_CHARACTER]
        piece = certain[self._emitted :]
        self._emitted = max(self._emitted, len(certain))
        if certain == text:
            self._slide()
        return piece

    def flush(self) -> str:
        """Return the text that is still pending; no more tokens follow."""
        rest = self._decode(self._window)[self._emitted :]
        self._emitted += len(rest)
        return rest

    def _slide(self) -> None:
        """Keep only a few returned tokens as context, and cut where characters are whole."""
        self._borders.append(len(self._window))
        far = [border for border in self._borders if len(self._window) - border >= _CONTEXT]
        if far:
            cut = far[-1]
            self._window = self._window[cut:]
            self._borders = [border - cut for border in self._borders if border >= cut]
            self._emitted = len(self._decode(self._window))


class StopScanner:
    """Finds stop words across piece boundaries and holds back text that may become one.

    >>> scanner = StopScanner(["END"])
    >>> scanner.push("an E"), scanner.push("N"), scanner.push("D."), scanner.hit
    ('an ', '', '', True)
    """

    def __init__(self, words: Sequence[str], *, keep: bool = False) -> None:
        self._words = [word for word in words if word]
        self._keep = keep
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """Add new text and return the text that can be sent."""
        if self.hit:
            return ""
        if not self._words:
            return piece
        text = self._held + piece
        matches = [(start, len(word)) for word in self._words if (start := text.find(word)) >= 0]
        if matches:
            self.hit, self._held = True, ""
            start, length = min(matches)
            return text[: start + length if self._keep else start]
        keep = max(_overlap(text, word) for word in self._words)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that was held back; no more text follows."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, word: str) -> int:
    """Return how many characters at the end of the text are the beginning of the word."""
    for length in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
