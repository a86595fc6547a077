"""The tokenizer ``scaffold`` as it runs in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmserve.runtime import RequestError


class ScaffoldTokenizer:
    """Converts text to ids and back; a :class:`llmserve.runtime.protocols.Tokenizer`."""

    # The generator knows the end-of-sequence ids; add those that only the tokenizer knows.
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        path = folder / settings["path"] / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Refuse: a RequestError is the request's own fault, and is reported to the client."""
        del messages
        problem = "this tokenizer has no chat template: send text_input"
        raise RequestError(problem, code="no_chat_template", param="messages")

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
