"""JSON from outside: what it has is counted before it is parsed.

A list takes two bytes as text and some eighty in memory, and Python's garbage collector visits all
of them again and again while they are made: 4 MB of nested lists hold up a process for seconds,
threads or not. To count characters takes milliseconds.
"""

from __future__ import annotations

import json
from typing import Any

MOST = 100_000
"""The lists, objects and keys of one text, or of several that come together."""
_MOST_SEPARATORS = 2_500_000
"""Numbers and texts in a list cost little: more than 4 MB can have."""


class TooManyPartsError(ValueError):
    """The text has more lists, objects and keys than will be parsed."""

    def __init__(self) -> None:
        super().__init__(f"it has more than {MOST} lists, objects and keys: send less at once")


class BoundedJson:
    """Parses texts that together have at most ``MOST`` lists, objects and keys."""

    def __init__(self) -> None:
        self._left = MOST

    def parse(self, text: str | bytes) -> Any:
        """Return what ``json.loads`` does, or raise :class:`TooManyPartsError` before it."""
        if isinstance(text, bytes):
            # As json.loads does it: in another encoding, bytes are no characters.
            text = text.decode(json.detect_encoding(text), "surrogatepass")
        parts, separators = _counted(text)
        if parts > self._left or separators > _MOST_SEPARATORS:
            # What is within texts was counted too.
            parts, separators = _counted(_without_texts(text))
        if parts > self._left or separators > _MOST_SEPARATORS:
            raise TooManyPartsError
        self._left -= parts
        return json.loads(text)


def parse_json(text: str | bytes) -> Any:
    """Parse one text from outside.

    >>> parse_json('{"a": [1, 2]}')
    {'a': [1, 2]}
    >>> parse_json('"' + "[" * 200_000 + '"')[:3]
    '[[['
    >>> parse_json("[" * 200_000)
    Traceback (most recent call last):
        ...
    llmserve.contract.bounded_json.TooManyPartsError: it has more than 100000 lists, objects and \
keys: send less at once
    """
    return BoundedJson().parse(text)


def _counted(text: str) -> tuple[int, int]:
    """Return how many lists, objects and keys there may be, and how many other values."""
    return text.count("[") + text.count("{") + text.count(":"), text.count(",")


def _without_texts(text: str) -> str:
    if "\\" in text:
        # What is left of an escape has neither quotes nor backslashes.
        text = text.replace("\\\\", "").replace('\\"', "")
    if text.count('"') > 2 * (_MOST_SEPARATORS + 2 * MOST):
        raise TooManyPartsError
    return "".join(text.split('"')[::2])
