"""Byte-level byte-pair encoding in plain Python, read from a ``tokenizer.json``."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import RequestError

# The words of GPT-2's pattern, as far as Python's own regular expressions can say it.
_WORD = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def _letters() -> list[str]:
    """Return the printable letter that stands for each byte in a ``tokenizer.json``."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


class BytePairs:
    """The runtime of the tokenizer ``acme-bpe``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        path = folder / settings["path"] / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        self._lowercase = bool(settings["lowercase"])
        self._ids: dict[str, int] = content["model"]["vocab"]
        pairs = (p.split(" ") if isinstance(p, str) else p for p in content["model"]["merges"])
        self._ranks = {tuple(pair): rank for rank, pair in enumerate(pairs)}
        self._special = {token["id"] for token in content["added_tokens"] if token["special"]}
        self.eos_ids = frozenset(self._special)
        letters = _letters()
        self._letters = letters
        self._bytes = {letter: byte for byte, letter in enumerate(letters)}
        self._texts = {i: text for text, i in self._ids.items()}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text; this family of models has no beginning token."""
        del special
        text = text.lower() if self._lowercase else text
        return [i for word in _WORD.findall(text) for i in self._encode_word(word)]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Refuse: Acme has no chat."""
        raise RequestError("acme-bpe has no chat template: send text_input instead of messages")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        letters = "".join(self._texts[i] for i in ids if i not in self._special)
        return bytes(self._bytes[letter] for letter in letters).decode(errors="replace")

    def _encode_word(self, word: str) -> list[int]:
        parts = [self._letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            ranked = [
                (self._ranks[pair], at)
                for at, pair in enumerate(itertools.pairwise(parts))
                if pair in self._ranks
            ]
            if not ranked:
                break
            _, at = min(ranked)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self._ids[part] for part in parts]
