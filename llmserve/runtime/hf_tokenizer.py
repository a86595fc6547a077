"""The tokenizer ``transformers``: whatever AutoTokenizer loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.location import located


class TransformersTokenizer:
    """A Hugging Face tokenizer, read from the repository or from the hub's cache."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        from transformers import AutoTokenizer

        where, options = located(settings, folder)
        self._tokenizer = AutoTokenizer.from_pretrained(where, **options)
        eos = self._tokenizer.eos_token_id
        self.eos_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids = [int(i) for i in self._tokenizer.encode(text, add_special_tokens=special)]
        begin = self._tokenizer.bos_token_id
        # Who renders the chat template elsewhere sends a text that begins with this already.
        return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> list[int]:
        """Return the ids of a conversation, by the model's own chat template."""
        options = {"add_generation_prompt": True, **options, "tokenize": False}
        try:
            text = self._tokenizer.apply_chat_template(list(messages), **options)
        except ValueError:
            raise RequestError(
                "this model has no chat template: send text_input instead of messages"
            ) from None
        except Exception as error:  # a template refuses in Jinja's own way
            raise RequestError(f"the chat template refuses these messages: {error}") from None
        # The template has written the special tokens already; a second BOS would mislead.
        return self.encode(text, special=False)

    def tokenizer_json(self) -> str | None:
        """Return what tokenizer.json would hold; None for a tokenizer written in Python."""
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None:
            return None
        fast = copy(fast)
        fast.no_padding()
        fast.no_truncation()
        return str(fast.to_str())

    def decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
