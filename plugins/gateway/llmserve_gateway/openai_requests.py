"""Requests of the OpenAI API, read into what llmserve's client is asked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmserve_gateway.errors import bad_request

MAX_CHOICES = 128
MAX_STOP_WORDS = 4

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant",
          "tool": "tool", "function": "tool"}  # fmt: skip

# What says something about the request and changes no answer.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata", "user", "store", "service_tier", "prompt_cache_key", "safety_identifier",
        "prompt_cache_retention", "prediction", "reasoning_effort", "verbosity",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request as the client of Triton is asked it; ``unknown`` are fields nobody knows here."""

    model: str
    prompts: list[str]
    options: dict[str, Any]
    is_chat: bool
    choices_each: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    logprobs: bool = False
    unknown: frozenset[str] = field(default_factory=frozenset)

    @property
    def bytes(self) -> int:
        """How much text there is to read, for a rough count of its tokens."""
        messages = self.options.get("messages")
        told = json.dumps(messages, ensure_ascii=False) if messages else "".join(self.prompts)
        return len(told.encode(errors="replace"))


def read_chat(content: Mapping[str, Any]) -> Asked:
    """Read the body of ``/v1/chat/completions``."""
    fields = _Fields(content)
    messages = _messages(fields.take("messages"))
    options = _sampling(fields)
    tokens = fields.number("max_completion_tokens", int, 1)
    limit = fields.number("max_tokens", int, 1)
    options["max_tokens"] = limit if tokens is None else tokens
    wants_logprobs = fields.boolean("logprobs")
    alternatives = fields.number("top_logprobs", int, 0, 20)
    if alternatives is not None and not wants_logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if wants_logprobs:
        options["logprobs"] = alternatives or 0
    fields.refuse_tools()
    options["messages"] = messages
    return _asked(fields, options, [""], is_chat=True, logprobs=wants_logprobs)


def read_completion(content: Mapping[str, Any]) -> Asked:
    """Read the body of ``/v1/completions``."""
    fields = _Fields(content)
    prompts = _prompts(fields.take("prompt"))
    options = _sampling(fields)
    options["max_tokens"] = fields.number("max_tokens", int, 1)
    alternatives = fields.number("logprobs", int, 0, 20)
    if alternatives is not None:
        options["logprobs"] = alternatives
    echo = fields.boolean("echo")
    if echo and alternatives is not None:
        raise bad_request("echo with logprobs: models give none for the prompt", "echo")
    if fields.take("suffix"):
        raise bad_request("suffix cannot be done: models only go on from a prompt", "suffix")
    best_of = fields.number("best_of", int, 1)
    if best_of not in (None, 1) and best_of != content.get("n"):
        raise bad_request("best_of other than n cannot be done", "best_of")
    return _asked(
        fields, options, prompts, is_chat=False, echo=echo, logprobs=alternatives is not None
    )


class _Fields:
    """The fields of a request, each taken once; what is left is not known."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._left = dict(content)

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not value:
            raise bad_request(f"{name} has to be a text", name)
        return value

    def boolean(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise bad_request(f"{name} has to be true or false", name)
        return bool(value)

    def number(
        self, name: str, kind: type[int] | type[float], low: float, high: float = math.inf
    ) -> Any:
        value = self.take(name)
        if value is None:
            return None
        is_number = isinstance(value, (int, float) if kind is float else int)
        if not is_number or isinstance(value, bool) or not low <= value <= high:
            most = "" if high == math.inf else f" to {high:g}"
            what = "a whole number" if kind is int else "a number"
            raise bad_request(f"{name} has to be {what} from {low:g}{most}", name)
        return kind(value)

    def refuse_tools(self) -> None:
        """Tools a model may ignore are ignored; what would have to be done is refused."""
        tools, choice = self.take("tools"), self.take("tool_choice")
        self.take("parallel_tool_calls")
        if tools and choice != "none":
            raise bad_request("this server cannot do tool calls yet: leave out tools", "tools")

    def rest(self) -> frozenset[str]:
        return frozenset(self._left) - _WITHOUT_EFFECT


def _asked(
    fields: _Fields, options: dict[str, Any], prompts: list[str], *, is_chat: bool, **extra: Any
) -> Asked:
    model = fields.text("model")
    count = fields.number("n", int, 1, MAX_CHOICES) or 1
    stream = fields.boolean("stream")
    told = fields.take("stream_options") or {}
    if not isinstance(told, dict):
        raise bad_request("stream_options has to be an object", "stream_options")
    if told and not stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    return Asked(
        model=model,
        prompts=[prompt for prompt in prompts for _ in range(count)],
        options={name: value for name, value in options.items() if value is not None},
        is_chat=is_chat,
        choices_each=count,
        stream=stream,
        include_usage=told.get("include_usage") is True,
        continuous_usage=told.get("continuous_usage_stats") is True,
        unknown=fields.rest(),
        **extra,
    )


def _sampling(fields: _Fields) -> dict[str, Any]:
    options: dict[str, Any] = {
        "temperature": fields.number("temperature", float, 0, 2),
        "top_p": fields.number("top_p", float, 0, 1),
        "top_k": fields.number("top_k", int, -1),
        "min_p": fields.number("min_p", float, 0, 1),
        "presence_penalty": fields.number("presence_penalty", float, -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", float, -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", float, 0),
        "seed": fields.number("seed", int, 0, 2**63 - 1),
        "min_tokens": fields.number("min_tokens", int, 0),
        "ignore_eos": fields.boolean("ignore_eos") or None,
        "stop_words": _stop_words(fields.take("stop")),
    }
    if options["top_k"] is not None and options["top_k"] <= 0:
        options["top_k"] = None  # As vLLM says that all tokens count.
    if options["top_p"] == 0:
        raise bad_request("top_p has to be above 0", "top_p")
    if fields.take("logit_bias"):
        raise bad_request("logit_bias cannot be done by this server's models", "logit_bias")
    form = fields.take("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise bad_request(
            "this server cannot hold answers to a form yet: leave out response_format",
            "response_format",
        )
    return options


def _stop_words(value: Any) -> list[str] | None:
    if value is None:
        return None
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise bad_request("stop has to be a text or a list of texts", "stop")
    if len(words) > MAX_STOP_WORDS:
        raise bad_request(f"stop takes at most {MAX_STOP_WORDS} texts", "stop")
    return [word for word in words if word] or None


def _prompts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(prompt, str) for prompt in value):
            return value
        if all(isinstance(entry, (int, list)) for entry in value):
            raise bad_request("prompts of token ids cannot be done: give texts", "prompt")
    raise bad_request("prompt has to be a text or a list of texts", "prompt")


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise bad_request("messages has to be a list with at least one message", "messages")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{where}.role has to be one of {', '.join(_ROLES)}", where)
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    return {"role": _ROLES[role], "content": _text(content, f"{where}.content")}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} has to be a text or a list of parts", where)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind in ("text", "input_text", "output_text") else None
        if not isinstance(text, str):
            raise bad_request(f"{where} has a part of type {kind!r}: only text can be read", where)
        parts.append(text)
    return "".join(parts)
