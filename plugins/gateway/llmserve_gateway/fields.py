"""The fields of a request, read one by one: what the dialects of the gateway share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmserve.client.tools import Tools
from llmserve_gateway.errors import bad_request

MAX_ANSWERS = 128
MAX_STOP_WORDS = 4
INCLUDE_STOP = "include_stop_str_in_output"
_MAX_BIASES = 1024

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant",
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
    """A request as the models are asked it; ``unknown`` are fields nobody knows here.

    ``options`` are those of the tensor contract. A prompt is a text, or token ids.
    ``silent`` wants nothing but its prompt back; ``tells_stop`` wants to know at which stop
    word the answer ended; ``repeated`` is what the answer tells of the request.
    """

    model: str
    options: dict[str, Any]
    prompts: list[str] | list[list[int]] = field(default_factory=lambda: [""])
    choices_each: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    silent: bool = False
    logprobs: bool = False
    tells_stop: bool = False
    tools: Tools | None = None
    repeated: Mapping[str, Any] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        """How many answers are wanted."""
        return len(self.prompts) * self.choices_each

    @property
    def parallel(self) -> bool:
        """Whether an answer may have several calls."""
        return self.tools is None or self.tools.parallel

    @property
    def tokens(self) -> int:
        """How many tokens there are to read, counted roughly; the model counts them exactly."""
        messages = self.options.get("messages")
        if messages:
            read = [messages, self.options.get("chat_template_kwargs")]
            size = len(json.dumps(read, ensure_ascii=False).encode(errors="replace"))
        else:
            size = sum(
                len(prompt.encode(errors="replace"))
                if isinstance(prompt, str)
                else len(prompt) * _BYTES_A_TOKEN
                for prompt in self.prompts
            )
        return size * self.choices_each // _BYTES_A_TOKEN + 1

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what to ask for each answer: a prompt and options."""
        calls: list[tuple[str, dict[str, Any]]] = []
        for prompt in self.prompts:
            for choice in range(self.choices_each):
                options = dict(self.options)
                if choice and "seed" in options:
                    # The same seed would give the same answer.
                    options["seed"] = (options["seed"] + choice) % 2**63
                if isinstance(prompt, str):
                    calls.append((prompt, options))
                else:
                    if self.echo:
                        # Only the model knows what they read as.
                        options["exclude_input_in_output"] = False
                    calls.append(("", {**options, "input_ids": prompt}))
        return calls


# A token is seldom shorter.
_BYTES_A_TOKEN = 3


class Noted(dict[str, Any]):
    """A request that is read to learn what can be asked: ``schemas`` has a field's, by name."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.schemas: dict[str, dict[str, Any]] = {}


class Fields:
    """The fields of a request, each taken once; what is left is not known."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._left = dict(content)
        self._schemas = content.schemas if isinstance(content, Noted) else None

    def take(self, name: str, **schema: Any) -> Any:
        """Take a field; ``schema`` is JSON schema's word for what it may be, beside null."""
        if self._schemas is not None:
            if "type" in schema:
                schema["type"] = [schema["type"], "null"]
            self._schemas[name] = schema
        return self._left.pop(name, None)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not value:
            raise bad_request(f"{name} has to be a text", name)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise bad_request(f"{name} has a character that UTF-8 cannot carry", name) from None
        return value

    def boolean(self, name: str) -> bool:
        value = self.take(name, type="boolean")
        if value is not None and not isinstance(value, bool):
            raise bad_request(f"{name} has to be true or false", name)
        return bool(value)

    def number(
        self,
        name: str,
        kind: type[int] | type[float],
        low: float,
        high: float = math.inf,
        *,
        above: bool = False,
    ) -> Any:
        """Take a number from ``low`` on, or ``above`` it."""
        bounds = {"exclusiveMinimum" if above else "minimum": low}
        bounds |= {} if high == math.inf else {"maximum": high}
        value = self.take(name, type="integer" if kind is int else "number", **bounds)
        if value is None:
            return None
        is_number = isinstance(value, (int, float) if kind is float else int)
        outside = not is_number or not low <= value <= high or (above and value == low)
        if outside or isinstance(value, bool):
            to = ", at most" if above else " to"
            most = "" if high == math.inf else f"{to} {high}"
            what = "a whole number" if kind is int else "a number"
            first = "above" if above else "from"
            raise bad_request(f"{name} has to be {what} {first} {low:g}{most}", name)
        try:
            return kind(value)
        except OverflowError:
            raise bad_request(f"{name} is larger than a number can be", name) from None

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.take(name, type="object")
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise bad_request(f"{name} has to be an object", name)
        return value

    def texts(self, name: str, most: int = MAX_STOP_WORDS) -> list[str] | None:
        """Take a text or a list of them."""
        several = {"type": "array", "maxItems": most, "items": {"type": "string"}}
        value = self.take(name, anyOf=[{"type": "string"}, several, {"type": "null"}])
        if value is None:
            return None
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise bad_request(f"{name} has to be a text or a list of texts", name)
        if len(words) > most:
            raise bad_request(f"{name} takes at most {most} texts", name)
        return [word for word in words if word] or None

    def refuse(self, why: str, *names: str) -> None:
        """Refuse fields that mean something which cannot be done."""
        for name in names:
            if self._left.pop(name, None):
                raise bad_request(f"{name}: {why}", name)

    def rest(self) -> frozenset[str]:
        """Return the names of what nobody has taken."""
        return frozenset(self._left) - _WITHOUT_EFFECT


def read_sampling(fields: Fields, stop: str = "stop", warmest: float = 2) -> dict[str, Any]:
    """Take the fields that say how tokens are chosen, under the names of the contract."""
    options: dict[str, Any] = {
        "temperature": fields.number("temperature", float, 0, warmest),
        "top_p": fields.number("top_p", float, 0, 1, above=True),
        "top_k": fields.number("top_k", int, -1),
        "min_p": fields.number("min_p", float, 0, 1),
        "presence_penalty": fields.number("presence_penalty", float, -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", float, -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", float, 0),
        "seed": fields.number("seed", int, 0, 2**63 - 1),
        "min_tokens": fields.number("min_tokens", int, 0),
        "ignore_eos": fields.boolean("ignore_eos") or None,
        "stop_words": fields.texts(stop),
        INCLUDE_STOP: fields.boolean(INCLUDE_STOP) or None,
        "logit_bias": _biases(fields.mapping("logit_bias")) or None,
    }
    if options["top_k"] is not None and options["top_k"] <= 0:
        options["top_k"] = None  # As vLLM says that all tokens count.
    return options


def _biases(given: dict[str, Any]) -> dict[str, float]:
    def fits(token: str, bias: Any) -> bool:
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        return token.isascii() and token.isdecimal() and is_number and -100 <= bias <= 100

    if len(given) > _MAX_BIASES or not all(fits(token, bias) for token, bias in given.items()):
        raise bad_request(
            f"logit_bias has to be numbers from -100 to 100 by token ids, at most {_MAX_BIASES}",
            "logit_bias",
        )
    return given


# What vLLM calls the forms that an answer can be held to, and what the contract does.
_FORMS = {"json": "json_schema", "json_object": "json_object", "choice": "choice",
          "regex": "regex", "grammar": "grammar"}  # fmt: skip


def read_tools(fields: Fields, messages: Any) -> Tools | None:
    """Take OpenAI's fields of tools; None where nothing may be called."""
    fields.refuse("it is an older name: use tools and tool_choice", "functions", "function_call")
    return Tools.of(
        {
            "messages": messages,
            "tools": fields.take("tools", type="array", items={"type": "object"}),
            "tool_choice": fields.take("tool_choice"),
            "parallel_tool_calls": fields.take("parallel_tool_calls", type="boolean"),
        }
    )


def read_form(fields: Fields, form: Any, place: str = "response_format") -> dict[str, Any]:
    """Return what an answer is held to: by OpenAI's ``response_format``, or in vLLM's words."""
    told = fields.mapping("structured_outputs")
    for name in _FORMS:
        told.setdefault(name, fields.take(f"guided_{name}"))
    options = {ours: told.pop(name) for name, ours in _FORMS.items() if told.get(name) is not None}
    if strange := [name for name, value in told.items() if value is not None]:
        raise bad_request(f"{str(strange[0])[:40]!r} cannot be done", "structured_outputs")
    for name, value in options.items():
        if value in ("", []):
            raise bad_request(f"{name} is empty: an answer cannot be held to it", name)
    options |= _format(form, place)
    if len(options) > 1:
        raise bad_request(f"only one of {', '.join(options)} can be had", "response_format")
    if isinstance(options.get("json_schema"), dict):
        options["json_schema"] = json.dumps(options["json_schema"])
    return options


def _format(form: Any, place: str) -> dict[str, Any]:
    kind = form.get("type") if isinstance(form, dict) else form
    if kind is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    # Chats have it one level deeper than responses.
    within = form.get("json_schema", form) if kind == "json_schema" else None
    schema = within.get("schema") if isinstance(within, dict) else None
    if not isinstance(schema, dict):
        what = f"{place} has to be text, json_object, or json_schema with a schema"
        raise bad_request(what, place)
    return {"json_schema": schema}


def read_messages(value: Any, name: str = "messages") -> list[dict[str, Any]]:
    """Return a conversation as chat templates read it."""
    if not isinstance(value, list) or not value:
        raise bad_request(f"{name} has to be a list with at least one message", name)
    return [_message(message, f"{name}[{at}]") for at, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(f"{where}.role has to be one of {', '.join(ROLES)}", where)
    content, calls = message.get("content"), message.get("tool_calls")
    told: dict[str, Any] = {"role": ROLES[role], "content": None}
    if role == "assistant" and calls:
        if not isinstance(calls, list):
            raise bad_request(f"{where}.tool_calls has to be a list", where)
        told["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)
        ]
    elif content is None and role == "assistant":
        content = ""
    if content is not None or "tool_calls" not in told:
        told["content"] = read_text(content, f"{where}.content")
    names = ("tool_call_id", "name") if told["role"] == "tool" else ()
    return told | {name: message[name] for name in names if isinstance(message.get(name), str)}


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} has to be a call of a function", where)
    return past_call(call.get("id"), function["name"], function.get("arguments"), where)


def past_call(id: Any, name: str, arguments: Any, where: str) -> dict[str, Any]:
    """Return a call that has been made as chat templates read it: its arguments are no text."""
    try:
        told = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise bad_request(f"{where}: the arguments of {name!r:.80} are no JSON object", where)
    call = {"type": "function", "function": {"name": name, "arguments": told}}
    return {"id": id, **call} if isinstance(id, str) else call


def read_text(content: Any, where: str) -> str:
    """Return a message's text, which may come in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} has to be a text or a list of parts", where)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind in ("text", "input_text", "output_text") else None
        if not isinstance(text, str):
            raise bad_request(
                f"{where} has a part of type {str(kind)[:40]!r}: only text can be read", where
            )
        parts.append(text)
    return "".join(parts)


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that were not asked for."""
    return {name: value for name, value in options.items() if value is not None}
