"""A tokenizer read from a ``tokenizer.json``, without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import RequestError


class BytePairs:
    """The runtime of the tokenizer ``acme-bpe``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        from tokenizers import Tokenizer

        path = folder / settings["path"] / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(path))
        self._lowercase = bool(settings["lowercase"])
        added = self._tokenizer.get_added_tokens_decoder()
        self.eos_ids = frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        text = text.lower() if self._lowercase else text
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise RequestError(
            "acme-bpe has no chat template: send text_input instead of messages",
            code="no_chat_template",
            param="messages",
        )

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
