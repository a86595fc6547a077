"""Runs in Triton: converts text to ids and back with ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import RequestError
from llmserve_tokens.chat import ChatTemplate, find_template


class FileTokenizer:
    """The runtime of the tokenizer ``tokenizers``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        from tokenizers import Tokenizer

        files = folder / settings["path"]
        self._tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
        # A file can enable both for training, but a prompt must stay as it is.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # This lets clients send prompts as ids.
        self.vocab_size = self._tokenizer.get_vocab_size()
        config = _read(files / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        template = find_template(files, config)
        self._chat = ChatTemplate(template, special_tokens) if template else None
        eos = special_tokens.get("eos_token")
        eos_id = None if eos is None else self._tokenizer.token_to_id(eos)
        self.eos_ids = frozenset() if eos_id is None else frozenset([eos_id])

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if self._chat is None:
            raise RequestError(
                "this model has no chat template: send text_input instead of messages",
                code="no_chat_template",
                param="messages",
            )
        # The template has already added the special tokens.
        return self.encode(self._chat.render(messages), special=False)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``bos_token``, ``eos_token`` and the like; each is a text or an object with one."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
