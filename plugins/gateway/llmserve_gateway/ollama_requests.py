"""Requests of Ollama's API, as its version 0.33 has them: chats, texts and embeddings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmserve.client import Tools
from llmserve.runtime.contract import EMBED, INT32, OPTIONS, SUFFIX, TRUNCATE
from llmserve_gateway.conversations import (
    CONTENT,
    Conversation,
    message_schema,
    read_messages,
)
from llmserve_gateway.errors import bad_request
from llmserve_gateway.fields import (
    STRING,
    Body,
    Field,
    Values,
    any_text,
    check_flag,
    flag,
    ignored,
    needed,
    option,
    part,
    reads,
    refused,
    said,
    text,
)
from llmserve_gateway.generation_fields import (
    MODEL,
    TEMPLATE,
    TOOL_LIST,
    Format,
    read_template,
    sampling,
)
from llmserve_gateway.text_requests import ParsedRequest, Thinking
from llmserve_gateway.value_requests import ValueRequest, texts

_LATEST = ":latest"
"""The tag that Ollama's clients add to a name, and that says nothing."""
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
# How the first bytes of each kind begin in base64.
_KINDS = {"/9j/": "jpeg", "R0lG": "gif", "UklG": "webp", "Qk": "bmp"}
_EFFORTS = ("high", "medium", "low", "max")
_ROLES = ("system", "user", "assistant", "tool")
_SPAN = re.compile(r"-?([0-9.]{1,20}|([0-9.]{1,20}(ns|us|µs|ms|s|m|h)){1,6})")
_PART = re.compile(r"([0-9.]+)([a-zµ]*)")
_UNITS = {"": 1, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_LONGEST = 1e15
"""In seconds: what is longer is no time."""
_NOTHING: dict[str, Any] = {"role": "user", "content": ""}
_ID = "call{:05}"
"""Mistral's templates accept only ids of nine such characters."""


def name_of(given: str) -> tuple[str, str]:
    """Return the model that a client names, and what it calls the model if not by its name."""
    name = given.removesuffix(_LATEST) or given
    return name, given if name != given else ""


# Conversations


def _conversation(value: Any, name: str) -> Conversation:
    if value == []:
        # Such a request only has the model loaded.
        return Conversation([], [])
    items = value if isinstance(value, list) else []
    return read_messages([*_messages(items, name)] if items else value, name)


def _messages(items: Sequence[Any], name: str) -> Sequence[Any]:
    """Return messages as OpenAI's chats have them.

    Ollama's have no ids of calls, whose results follow in their order.
    """
    found: list[Any] = []
    waiting: list[str] = []
    count = 0
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            found.append(item)
            continue
        message = {**item, "content": item.get("content") or ""}
        if isinstance(role := item.get("role"), str):
            message["role"] = role.lower()
        if isinstance(item.get("tool_calls"), list):
            calls, waiting = [], []
            for call in item["tool_calls"]:
                if isinstance(call, dict):
                    count += 1
                    call = {**call, "id": call.get("id") or _ID.format(count)}
                    waiting.append(call["id"])
                calls.append(call)
            message["tool_calls"] = calls
        if message.get("role") == "tool":
            next_id = waiting.pop(0) if waiting else None
            message["tool_call_id"] = item.get("tool_call_id") or next_id
            message["name"] = item.get("tool_name")
        if isinstance(item.get("thinking"), str):
            message["reasoning_content"] = item["thinking"]
        if item.get("images"):
            where = f"{name}[{index}].images"
            message["content"] = _seen(message["content"], item["images"], where)
        found.append(message)
    return found


def _seen(content: Any, images: Any, where: str) -> Any:
    """Return a message's text with its images before it, where Ollama puts them."""
    parts = [{"type": "text", "text": content}] if content else []
    return [*({"type": "image_url", "image_url": url} for url in _images(images, where)), *parts]


def _images(value: Any, where: str) -> list[str]:
    if not isinstance(value, list):
        raise bad_request(f"{where} must be a list", where)
    return [_address(image, f"{where}[{index}]") for index, image in enumerate(value)]


def _address(image: Any, where: str) -> str:
    """Return an image as an address that has it inside."""
    if not isinstance(image, str) or not _BASE64.fullmatch(image):
        raise bad_request(f"{where} must be an image in base64", where)
    kind = next((kind for start, kind in _KINDS.items() if image.startswith(start)), "png")
    return f"data:image/{kind};base64,{image}"


# Fields


def _seconds(value: Any, name: str) -> float:
    """Return for how long a model is kept."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        if isinstance(value, str) and _SPAN.fullmatch(value):
            parts = _PART.findall(value.lstrip("-"))
            seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
            return -seconds if value.startswith("-") else seconds
        if is_number and abs(value) <= _LONGEST:
            return float(value)
    except ValueError:
        pass  # There are two points in it.
    raise bad_request(f"{name} must be seconds, or a duration such as 5m", name)


def _length(value: Any, name: str) -> int | None:
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not -2 <= value <= INT32:
        raise bad_request(f"{name} must be an integer from -2 to {INT32}", name)
    # Up to the end of the context.
    return value if value > 0 else None


def _form(value: Any, name: str) -> Format:
    if value == "":
        return Format(value, {}, name)
    if value == "json":
        return Format(value, {"json_object": True}, name)
    if not isinstance(value, dict):
        raise bad_request(f'{name} must be "json" or a JSON schema', name)
    return Format(value, {"json_schema": json.dumps(value)}, name)


def _think(value: Any, name: str) -> Thinking:
    if isinstance(value, bool):
        return Thinking(value, required_by=name if value else "")
    if not isinstance(value, str) or value not in _EFFORTS:
        raise bad_request(f"{name} must be true, false, {', '.join(_EFFORTS)}", name)
    return Thinking(True, effort=value, required_by=name)


_STREAM: Field[bool] = Field(
    "stream", "Send the answer in pieces, as lines; so it is if this is not sent.", check_flag,
    {"type": "boolean"}, absent=True,
)  # fmt: skip
_KEEP_ALIVE: Field[float | None] = Field(
    "keep_alive", "How long the model stays loaded after this request, if models are loaded on "
    "demand and the key may unload them: seconds, or a duration such as 5m; below 0 without end.",
    _seconds, {"anyOf": [{"type": "number", "minimum": -_LONGEST, "maximum": _LONGEST},
                         {**STRING, "pattern": f"^(?:{_SPAN.pattern})$"}]},
)  # fmt: skip
_LOGPROBS = flag("logprobs", "Return the log-probabilities of the answer's tokens.")
_TOP_LOGPROBS = option(OPTIONS["logprobs"], "top_logprobs", passed=False)
_FORMAT: Field[Format | None] = Field(
    "format", "The form of the answer: json, or a JSON schema.", _form,
    {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]},
)  # fmt: skip
_THINK: Field[Thinking] = Field(
    "think", "Whether the model thinks before it answers, and how much.", _think,
    {"anyOf": [{"type": "boolean"}, {"enum": [*_EFFORTS]}]}, absent=Thinking(),
)  # fmt: skip
_SAMPLED = {row.name: row for row in sampling(max_temperature=OPTIONS["temperature"].high)}
_OPTIONS = part(
    "options",
    "How the answer is made.",
    Body(
        Field(
            "num_predict", "The longest answer, in tokens; up to 0 there is no limit.", _length,
            {"type": "integer", "minimum": -2, "maximum": INT32}, option="max_tokens",
        ),
        *(_SAMPLED[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop",
                                      "presence_penalty", "frequency_penalty")),
        replace(_SAMPLED["repetition_penalty"], name="repeat_penalty"),
        # What is set when a model is built, and what Ollama has of llama.cpp alone.
        *ignored("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread",
                 "num_keep", "draft_num_predict", "repeat_last_n", "typical_p"),
    ),
)  # fmt: skip
_TEMPLATES = "models are asked in their own template: build the model with another"
_SHARED: tuple[Field[Any], ...] = (
    MODEL,
    _STREAM,
    _FORMAT,
    _OPTIONS,
    _THINK,
    _KEEP_ALIVE,
    _LOGPROBS,
    _TOP_LOGPROBS,
    *TEMPLATE,
    # Prompts are never cut, and a request that does not fit is refused.
    *ignored("truncate", "shift"),
    *refused("/tokenize has the tokens of a conversation", "_debug_render_only"),
)
_NAMES = {"tool_name": STRING, "thinking": STRING, "images": {"type": "array", "items": STRING}}
_MESSAGES: Field[Conversation] = Field(
    "messages", "The conversation; without any message, the model is only loaded.", _conversation,
    {"type": "array", "items": message_schema(
        required=[], roles=_ROLES, content={"anyOf": [CONTENT, {"type": "null"}]},
        tool_calls={"type": ["array", "null"]}, **_NAMES)},
    absent=Conversation([], []),
)  # fmt: skip
CHAT = Body(_MESSAGES, TOOL_LIST, *_SHARED)
_PROMPT = any_text("prompt", "What the model answers; without it, the model is only loaded.")
_SYSTEM = any_text("system", "What the system says before the prompt.")
_SUFFIX = any_text(
    "suffix", "What follows: the model fills in what is between the prompt and it, if it can."
)
_RAW = flag("raw", "Continue the prompt as it is, without the model's template.")
_IMAGES: Field[list[str]] = Field(
    "images", "Images that the prompt is about, in base64.", _images,
    {"type": "array", "items": {**STRING, "pattern": f"^{_BASE64.pattern}$"}}, absent=(),
)  # fmt: skip
TEXT = Body(
    _PROMPT,
    _SYSTEM,
    _SUFFIX,
    _RAW,
    _IMAGES,
    *_SHARED,
    *refused(_TEMPLATES, "template"),
    *refused("send the conversation to /api/chat", "context"),
)


@reads(CHAT)
def read_chat(values: Values) -> ParsedRequest:
    conversation = values[_MESSAGES]
    return _parsed(values, conversation, given=values[TOOL_LIST])


@reads(TEXT)
def read_text(values: Values) -> ParsedRequest:
    prompt, system, images = values[_PROMPT], values[_SYSTEM], values[_IMAGES]
    is_raw, suffix = values[_RAW], values[_SUFFIX]
    if is_raw or suffix:
        if system or images:
            name = "system" if system else "images"
            how = "raw is a prompt as it is" if is_raw else "what is around a gap is read as it is"
            raise bad_request(f"{name}: {how}, without any template", name)
        return _parsed(values, Conversation([], []), prompt, suffix)
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": parts if images else prompt})
    conversation = Conversation(messages if prompt else [], [*images])
    return _parsed(values, conversation)


def _parsed(
    values: Values,
    conversation: Conversation,
    prompt: str = "",
    suffix: str = "",
    given: Any = None,
) -> ParsedRequest:
    model, asked = name_of(values[MODEL])
    messages, more = conversation.messages, values[_OPTIONS]
    only_loads = not (messages or prompt or suffix)
    options = {**more.options, **({SUFFIX: suffix} if suffix else {})}
    form = values[_FORMAT]
    if form is not None:
        options |= form.options
    wants_logprobs, top_logprobs = values[_LOGPROBS], values[_TOP_LOGPROBS]
    thinking = values[_THINK]
    if wants_logprobs:
        options["logprobs"] = top_logprobs or 0
    template = read_template(values, messages or [_NOTHING], prefills=True)
    if messages:
        options |= conversation.options | template
    tools = Tools.of({"messages": messages, "tools": given}) if messages else None
    return ParsedRequest(
        model=model,
        asked=asked,
        options=tools.options(options) if tools else options,
        stream=values[_STREAM],
        logprobs=wants_logprobs,
        tools=tools,
        prompts=[prompt],
        thinking=thinking if messages else Thinking(),
        only_loads=only_loads,
        keep=values[_KEEP_ALIVE],
        sent={**(form.sent if form else {}), "max_tokens": "num_predict"},
        unknown=values.unknown | {f"options.{name}" for name in more.unknown},
    )


# Embeddings

_DIMENSIONS = option(OPTIONS["dimensions"], low=0, then=lambda count: count or None)
_TRUNCATE = said("truncate", "Whether a text that is too long is cut; so it is if not sent.")
_READ: tuple[Field[Any], ...] = (MODEL, *ignored("options"), _KEEP_ALIVE)
_INPUT = needed(texts("input", "A text, or a list of texts."))
_ONE = needed(text("prompt", "A text."))
EMBEDDED = Body(_INPUT, _DIMENSIONS, _TRUNCATE, *_READ)
EMBEDDED_ONE = Body(_ONE, *_READ)


@reads(EMBEDDED)
def read_embed(values: Values) -> ValueRequest:
    return _valued(values, values[_INPUT], _INPUT.name, cut=values[_TRUNCATE])


@reads(EMBEDDED_ONE)
def read_embedding(values: Values) -> ValueRequest:
    return _valued(values, [values[_ONE]], _ONE.name)


def _valued(
    values: Values, given: list[str], name: str, *, cut: bool | None = None
) -> ValueRequest:
    model, asked = name_of(values[MODEL])
    options = {**values.options, **({TRUNCATE.name: True} if cut else {})}
    return ValueRequest(
        model, (EMBED,), given, options=options, cut=cut, asked=asked, keep=values[_KEEP_ALIVE],
        sent={"text_input": name}, unknown=values.unknown,
    )  # fmt: skip


# What is asked about models

_OLD_NAME = text("name", "The same, by its older name.")
_EITHER = [["model"], ["name"]]
_NAME = text("model", "The name of a model.")
SHOWN = Body(_NAME, _OLD_NAME, *ignored("verbose", "system", "template", "options"), any_of=_EITHER)
PULLED = Body(
    _NAME, _OLD_NAME, *ignored("stream", "insecure", "username", "password"), any_of=_EITHER
)


def read_named(content: Mapping[str, Any]) -> str:
    """Return the model that a request is about."""
    values = SHOWN.read(content)
    return name_of(MODEL.read(values[_NAME] or values[_OLD_NAME]))[0]
