"""The tokenizer ``transformers``: whatever AutoTokenizer loads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.location import located

# Special tokens that are text to whoever reads an answer: without them no call of a tool is found.
_OF_CALLS = re.compile(r"tool|python_tag|\[(ARGS|CALL_ID)\]", re.IGNORECASE)


class TransformersTokenizer:
    """A Hugging Face tokenizer, read from the repository or from the hub's cache."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        from transformers import AutoTokenizer

        where, options = located(settings, folder)
        self._tokenizer = AutoTokenizer.from_pretrained(where, **options)
        eos = self._tokenizer.eos_token_id
        self.eos_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
        self.vocab_size = len(self._tokenizer)
        added = self._tokenizer.added_tokens_decoder
        special = {i for i, token in added.items() if token.special} - self.eos_ids
        self._shown = {i for i in special if _OF_CALLS.search(added[i].content)}
        self._hidden = (special - self._shown) | self.eos_ids

    @property
    def chat_template(self) -> str | None:
        """The text of the model's chat template, or of all that it has."""
        template = self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids = [int(i) for i in self._tokenizer.encode(text, add_special_tokens=special)]
        begin = self._tokenizer.bos_token_id
        # Who renders the chat template elsewhere sends a text that begins with this already.
        return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the ids of a conversation, by the model's own chat template."""
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template: send text_input instead of messages"
            )
        if "chat_template" in options:
            # Nothing bounds how long a stranger's template runs.
            raise RequestError("chat_template_kwargs cannot have a chat_template of its own")
        options = {"add_generation_prompt": True, **options, "tokenize": False}
        reason: Exception | None = None
        for attempt in _as_templates_take(messages):
            try:
                text = self._tokenizer.apply_chat_template(attempt, **options)
            except Exception as error:  # a template refuses in Jinja's own way
                reason = reason or error
            else:
                # The template has written the special tokens already; a second BOS would mislead.
                return self.encode(text, special=False)
        raise RequestError(f"the chat template refuses these messages: {reason}")

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
        told = list(ids)
        shows = not self._shown.isdisjoint(told)
        if shows:
            told = [i for i in told if i not in self._hidden]
        return str(
            self._tokenizer.decode(
                told, skip_special_tokens=not shows, clean_up_tokenization_spaces=False
            )
        )


def _as_templates_take(messages: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Give a conversation in the forms that templates differ in, the usual one first.

    Some join what an assistant says beside its calls to a text, though it be nothing; most write
    the arguments of calls as JSON themselves, and a few join them to a text as well.
    """
    forms = [[dict(message) for message in messages]]
    if any(message.get("tool_calls") for message in messages):
        forms.append([{**message, "content": message["content"] or ""} for message in messages])
        forms += [[_with_texts(message) for message in form] for form in forms]
    return forms


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    def text(call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    calls = [text(call) for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else dict(message)
