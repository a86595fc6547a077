"""The tokenizer ``transformers``: any tokenizer that AutoTokenizer can load."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmserve.runtime.answer.fill_in import File, find_fill_in
from llmserve.runtime.errors import RequestError, invalid_value, panics_as_errors
from llmserve.runtime.location import located

# Special tokens that answers must show as text: without them, no client finds a tool call or tells
# the model's thinking from its answer.
_MARK = re.compile(
    r"tool|think|python_(tag|start|end)|\[(ARGS|CALL_ID)\]|(START|END)_(ACTION|RESPONSE)"
    r'|^<\|?channel\|?>$|^<\|"\|>$',
    re.IGNORECASE,
)
# gpt-oss writes everything in messages with headers. Other models have tokens of these names, too.
_CHANNEL = "<|channel|>"
_HEADERS = {_CHANNEL, "<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"}

# What no vocabulary joins with a text after it.
_ANCHOR = "☺"
_ASKS_FOR_NONE = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none""", re.IGNORECASE)


_MARKED = "llmserve"


class TransformersTokenizer:
    """A Hugging Face tokenizer, read from the repository or from the hub's cache.

    Settings of models that answer with values: ``prompts`` and ``default_prompt``, and whether they
    read everything in ``lowercase``.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        from transformers import AutoTokenizer

        location, options = located(settings, folder)
        self._tokenizer = AutoTokenizer.from_pretrained(location, **options)
        eos = self._tokenizer.eos_token_id
        self.eos_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
        self.vocab_size = len(self._tokenizer)
        special = _special_tokens(self._tokenizer)
        marks = _HEADERS if _CHANNEL in special.values() else set()
        self._visible = {i for i, text in special.items() if _MARK.search(text) or text in marks}
        self._visible -= self.eos_ids
        self._hidden = (special.keys() - self._visible) | self.eos_ids
        self.fill_in = find_fill_in(self._id_of)
        # What no text of a gap may become; vocabularies do not call all of these special.
        marks_of_gaps = self.fill_in.ids if self.fill_in else {}
        unknown = getattr(self._tokenizer, "unk_token", None)
        reserved = {text: i for i, text in special.items() if text != unknown} | marks_of_gaps
        self._reserved = frozenset(reserved.values())
        # That of CodeLlama makes a gap of a word as well.
        names = {*reserved, getattr(self._tokenizer, "fill_token", None) or ""}
        self._names = "|".join(re.escape(name) for name in names if len(name) > 1)
        self.prompts: Mapping[str, str] = settings.get("prompts", {})
        self.default_prompt: str | None = settings.get("default_prompt")
        self._lowercase = bool(settings.get("lowercase", False))
        # Tokenizers of transformers before 4.34 do not tell.
        self._segments = "token_type_ids" in getattr(self._tokenizer, "model_input_names", ())
        self.cuts_beginnings = getattr(self._tokenizer, "truncation_side", "right") == "left"
        self._whole: Any = None
        self._parts_wanted: bool | None = None

    @property
    def chat_template(self) -> str | None:
        """The model's chat template; if it has several, all of them joined."""
        # transformers has chat templates since 4.34.
        template = getattr(self._tokenizer, "chat_template", None)
        return "\n".join(template.values()) if isinstance(template, dict) else template

    @property
    def special_tokens(self) -> Mapping[str, Any]:
        """The texts of special tokens by their usual names, and those put around each text."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        texts = {name: getattr(self._tokenizer, name, None) for name in names}
        named = {name: None if text is None else str(text) for name, text in texts.items()}
        return {**named, "around": self.encode("")}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        try:
            with panics_as_errors():
                encoded = self._tokenizer.encode(text, add_special_tokens=special)
        except RuntimeError as error:  # Such as a regular expression that gave up on this text.
            raise RequestError(
                f"the tokenizer refuses this text: {error}",
                code="invalid_value",
                param="text_input",
            ) from None
        ids = [int(i) for i in encoded]
        bos = self._tokenizer.bos_token_id
        # A client that renders the chat template itself sends text that already begins with BOS.
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def encode_pair(
        self, text: str, pair: str | None = None, *, limit: int | None = None
    ) -> tuple[list[int], list[int] | None]:
        """Return the ids of a text or of two, and which of the two each belongs to."""
        if self._lowercase:
            text, pair = text.lower(), pair and pair.lower()
        try:
            with panics_as_errors():
                ids, types = self._encoded(text, pair, limit)
        except RuntimeError as error:  # Such as a regular expression that gave up on this text.
            raise RequestError(
                f"the tokenizer refuses this text: {error}",
                code="invalid_value",
                param="text_input",
            ) from None
        return ids, types if self._segments and pair is not None else None

    def _encoded(
        self, text: str, pair: str | None, limit: int | None
    ) -> tuple[list[int], list[int]]:
        if self._whole is None:
            self._whole = self._without_limits() or False
        if limit is None and self._whole:
            # What wraps it takes several times as long as the library itself for a short text.
            found = self._whole.encode(text, pair)
            return found.ids, found.type_ids
        found = self._tokenizer(
            text,
            pair,
            truncation=False if limit is None else "longest_first",
            max_length=limit,
            return_token_type_ids=True,
            verbose=False,
        )
        return list(found["input_ids"]), list(found["token_type_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the ids of a conversation, rendered with the model's chat template."""
        # The template has already added the special tokens; a second BOS would mislead.
        return self.encode(self.render_chat(messages, **options), special=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the text of a conversation, with a mark where it shows an image."""
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template: send text_input instead of messages",
                code="no_chat_template",
                param="messages",
            )
        if "chat_template" in options:
            # The run time of a client's template is unbounded.
            raise invalid_value("chat_template_kwargs", "cannot contain a chat_template")
        options = {"add_generation_prompt": True, **options, "tokenize": False}
        if self._wants_parts():
            messages = [{**message, "content": _in_parts(message)} for message in messages]
        reason: Exception | None = None
        asks = bool(_ASKS_FOR_NONE.search(self.chat_template))
        for variant in _message_variants(messages, asks_for_none=asks):
            try:
                return str(self._tokenizer.apply_chat_template(variant, **options))
            except Exception as error:  # templates raise arbitrary errors through Jinja
                reason = reason or error
        problem = f"the chat template refuses these messages: {reason}"
        raise RequestError(problem, code="invalid_value", param="messages")

    def _wants_parts(self) -> bool:
        """Return whether the template looks for texts in parts of a message only.

        Those of many models that read images do, and leave out a content that is a text.
        """
        if self._parts_wanted is None:
            self._parts_wanted = False
            if "type" in (self.chat_template or ""):
                as_text, in_parts = (
                    self._renders_mark(content) for content in (_MARKED, _text_part(_MARKED))
                )
                self._parts_wanted = in_parts and not as_text
        return self._parts_wanted

    def _renders_mark(self, content: Any) -> bool:
        try:
            message = {"role": "user", "content": content}
            text = self._tokenizer.apply_chat_template([message], tokenize=False)
        except Exception:  # templates raise arbitrary errors through Jinja
            return False
        return _MARKED in text

    def encode_fill_in(self, prefix: str, suffix: str, files: Sequence[File]) -> list[int]:
        """Return the ids of a prompt with a gap; only its marks have the ids of special tokens."""
        if self.fill_in is None:
            problem = "this tokenizer has no tokens to fill in a gap"
            raise RequestError(problem, code="unsupported_option", param="suffix")
        bos = self._tokenizer.bos_token_id
        begins = [bos] if bos is not None and self.encode("")[:1] == [bos] else []
        return [*begins, *self.fill_in.prompt(prefix, suffix, files, self._encode_plain)]

    def _encode_plain(self, text: str, goes_on: bool) -> list[int]:
        """Return the ids of a text that has no special tokens, whatever it says.

        One that ``goes_on`` gets no space before it, which some vocabularies put before every text.
        """
        begin = self._continued if goes_on else partial(self.encode, special=False)
        ids = begin(text)
        if self._reserved.isdisjoint(ids):
            return ids
        # Cut within each of their names, so that none is whole.
        found = re.finditer(f"(?={self._names})", text)
        cuts = [0, *(name.start() + 1 for name in found), len(text)]
        first, *others = (text[start:end] for start, end in pairwise(cuts))
        ids = begin(first) + [token for piece in others for token in self._continued(piece)]
        if not self._reserved.isdisjoint(ids):
            raise invalid_value("suffix", "needs texts without the model's special tokens")
        return ids

    def _continued(self, text: str) -> list[int]:
        """Return the ids of a text as they are in the middle of a line."""
        first = self._tokenizer.convert_ids_to_tokens(self.encode("a", special=False)[:1])
        if first == ["a"] or not text:
            return self.encode(text, special=False)
        anchor = self.encode(_ANCHOR, special=False)
        ids = self.encode(_ANCHOR + text, special=False)
        is_apart = ids[: len(anchor)] == anchor
        return ids[len(anchor) :] if is_apart else self.encode(text, special=False)

    def _id_of(self, text: str) -> int | None:
        """Return the id of a token by its text in the vocabulary; None if it has none."""
        token = self._tokenizer.convert_tokens_to_ids(text)
        is_known = isinstance(token, int) and self._tokenizer.convert_ids_to_tokens(token) == text
        return token if is_known else None

    def tokenizer_json(self) -> str | None:
        """Return the content of tokenizer.json; None for a tokenizer written in Python."""
        fast = self._without_limits()
        return None if fast is None else str(fast.to_str())

    def _without_limits(self) -> Any:
        """Return a tokenizer of the library ``tokenizers`` that neither cuts nor pads."""
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None:
            return None
        fast = copy(fast)
        fast.no_padding()
        fast.no_truncation()
        return fast

    def decode(self, ids: Sequence[int]) -> str:
        ids = list(ids)
        has_marks = not self._visible.isdisjoint(ids)
        if has_marks:
            ids = [i for i in ids if i not in self._hidden]
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=not has_marks, clean_up_tokenization_spaces=False
            )
        )


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of the special tokens by their ids."""
    if not hasattr(tokenizer, "added_tokens_decoder"):
        # transformers before 4.34, as in NVIDIA's containers of the time.
        return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = tokenizer.added_tokens_decoder
    return {i: token.content for i, token in added.items() if token.special}


def _message_variants(
    messages: Sequence[Mapping[str, Any]], *, asks_for_none: bool
) -> list[list[dict[str, Any]]]:
    """Return a conversation in the variants that templates expect, the usual one first.

    An assistant's content may be None next to tool calls: some templates ask whether it is, some
    concatenate it, and some would write the word. Most serialize the arguments of tool calls to
    JSON themselves, but a few expect them as text.
    """
    variants = [[dict(message) for message in messages]]
    if any(message.get("tool_calls") for message in messages):
        texts = [{**message, "content": message["content"] or ""} for message in messages]
        variants.insert(1 if asks_for_none else 0, texts)
        variants += [[_with_json_arguments(message) for message in v] for v in variants]
    return variants


def _text_part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _in_parts(message: Mapping[str, Any]) -> Any:
    content = message["content"]
    return _text_part(content) if isinstance(content, str) else content


def _with_json_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    def serialize(call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    calls = [serialize(call) for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else dict(message)
