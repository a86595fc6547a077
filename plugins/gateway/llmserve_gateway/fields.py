"""Request fields and their validation, shared by all API dialects of the gateway."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from llmserve.client import Tools
from llmserve.runtime.contract import (
    API_NAMES,
    BIASES,
    GENERATE,
    IMAGE_URL,
    INT32,
    OPTIONS,
    BoundedJson,
    RequestOption,
)
from llmserve_gateway.bodies import check_depth
from llmserve_gateway.errors import bad_request

MAX_ANSWERS = 128
# Those of models that answer with values have requests of their own.
_SAMPLING = tuple(
    OPTIONS[name] for name in API_NAMES if OPTIONS[name].group not in ("reading", "vector")
)
# The names of output constraints in vLLM's API, and those of the tensor contract.
_CONSTRAINTS = {row.api: row.name for row in OPTIONS.values() if row.api and row.group == "forms"}

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant",
          "tool": "tool", "function": "tool"}  # fmt: skip

# Accepted, but without any effect on the answer.
_IGNORED = frozenset(
    {
        "metadata", "user", "store", "service_tier", "prompt_cache_key", "safety_identifier",
        "prompt_cache_retention", "prediction", "verbosity",
    }
)  # fmt: skip

_SEEDS = 2**63
_CONTINUES = "continue_final_message"

# What changes an answer in vLLM's API or in others, and cannot be had here.
_REFUSED = {
    "stop_token_ids": "answers end at the model's own end tokens and at the texts in stop",
    "allowed_token_ids": "send a choice, regex or grammar in structured_outputs",
    "chat_template": "models are asked in their own template: build the model with another",
    "documents": "no template is known to show them: send chat_template_kwargs if the model's does",
    "use_beam_search": "answers are sampled, or greedy at temperature 0",
    "truncate_prompt_tokens": "prompts are not cut: send a shorter one",
    "prompt_logprobs": "/v1/completions has those of the prompt with echo and logprobs",
    "return_token_ids": "/tokenize has the ids of a text",
}


@dataclass(frozen=True)
class Thinking:
    """What a request asks of a model's thinking; None where it leaves that to the model."""

    enabled: bool | None = None
    effort: str | None = None
    required_by: str = ""
    """The field that only makes sense if the model thinks before it answers."""
    budget: int | None = None
    """After how many tokens the thinking should end, if that can be had."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for a chat template that say so, as families name them."""
        enabled = False if self.effort == "none" else self.enabled
        switch = {} if enabled is None else {"enable_thinking": enabled, "thinking": enabled}
        effort = {"reasoning_effort": self.effort} if self.effort not in (None, "none") else {}
        return {**switch, **effort}


@dataclass(frozen=True)
class ParsedRequest:
    """A validated request in terms of the tensor contract; ``unknown`` are unsupported fields.

    ``options`` are those of the tensor contract. A prompt is a text, or token ids.
    ``echo_only`` requests return nothing but their prompt; ``report_stop_word`` requests return
    the stop word that ended the answer; ``echoed_fields`` are repeated in the response. ``sent``
    maps names of the contract to the fields that the client used, where those vary.
    """

    model: str
    options: dict[str, Any]
    prompts: list[str] | list[list[int]] = field(default_factory=lambda: [""])
    answers_per_prompt: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    echo_only: bool = False
    logprobs: bool = False
    report_stop_word: bool = False
    tools: Tools | None = None
    thinking: Thinking = Thinking()
    has_parts: bool = False
    """Whether an answer may have more than text: it is known only when the model is."""
    echoed_fields: Mapping[str, Any] = field(default_factory=dict)
    sent: Mapping[str, str] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()

    tasks = (GENERATE,)
    """What models are for that can answer it."""
    cuts = False

    @property
    def answer_count(self) -> int:
        return len(self.prompts) * self.answers_per_prompt

    @property
    def parallel_calls(self) -> bool:
        """Whether an answer may contain several tool calls."""
        return self.tools is None or self.tools.parallel

    @cached_property
    def estimated_tokens(self) -> int:
        """A rough count of the prompt tokens; the model counts them exactly."""
        images = len(self.options.get(IMAGE_URL.name, ())) * _IMAGE_TOKENS * BYTES_PER_TOKEN
        size = self._prompt_bytes + images
        return size * self.answers_per_prompt // BYTES_PER_TOKEN + 1

    @property
    def held_tokens(self) -> int:
        """What it counts as while it waits: images and schemas are in memory as well."""
        return self.estimated_tokens + self._other_bytes // HELD_BYTES_PER_TOKEN

    @property
    def sent_bytes(self) -> int:
        """About how much is sent to the model: its prompt and all options for each answer."""
        others = len(self.prompts) * self._other_bytes
        return self.answers_per_prompt * (self._prompt_bytes + others)

    @cached_property
    def _prompt_bytes(self) -> int:
        if messages := self.options.get("messages"):
            content = [messages, self.options.get("chat_template_kwargs")]
            return len(json.dumps(content, ensure_ascii=False).encode(errors="replace"))
        return sum(
            len(prompt.encode(errors="replace"))
            if isinstance(prompt, str)
            else len(prompt) * BYTES_PER_TOKEN
            for prompt in self.prompts
        )

    @property
    def _other_bytes(self) -> int:
        values = self.options.values()
        texts = [each for value in values for each in (value if type(value) is list else [value])]
        return sum(sys.getsizeof(text) for text in texts if isinstance(text, str))

    def model_calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Return a prompt and options for each answer."""
        calls: list[tuple[str, dict[str, Any]]] = []
        for prompt in self.prompts:
            for choice in range(self.answers_per_prompt):
                options = dict(self.options)
                if choice and "seed" in options:
                    # The same seed would give the same answer.
                    options["seed"] = (options["seed"] + choice) % 2**63
                if isinstance(prompt, str):
                    calls.append((prompt, options))
                else:
                    if self.echo:
                        # Only the model knows the text of these tokens.
                        options["exclude_input_in_output"] = False
                    calls.append(("", {**options, "input_ids": prompt}))
        return calls


# What it has inside is left to the model, which knows what it reads.
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,[A-Za-z0-9+/]+={0,2}")
_EFFORT = re.compile(r"[a-z]{1,16}")
# A token is seldom shorter.
BYTES_PER_TOKEN = 3
# What is no prompt takes memory and no time: 256 MB is as much as a million tokens.
HELD_BYTES_PER_TOKEN = 256
# Models make some hundreds to thousands of one.
_IMAGE_TOKENS = 1000
_TOKEN_IDS = range(INT32 + 1)
TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": INT32}


class SchemaProbe(dict[str, Any]):
    """An example request that records the JSON schema of every field that is read from it."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.schemas: dict[str, dict[str, Any]] = {}


class Fields:
    """The fields of a request, each read once; those that remain are unknown."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._remaining = dict(content)
        self._schemas = content.schemas if isinstance(content, SchemaProbe) else None

    def take(self, name: str, **schema: Any) -> Any:
        """Take a field; ``schema`` is JSON schema for its valid values, besides null."""
        if self._schemas is not None:
            if "type" in schema:
                schema["type"] = [schema["type"], "null"]
            self._schemas[name] = schema
        return self._remaining.pop(name, None)

    def text(self, name: str, *, required: bool = True) -> Any:
        value = self.take(name, type="string")
        if value is None and not required:
            return None
        if not isinstance(value, str) or not value:
            raise bad_request(f"{name} must be a non-empty string", name)
        check_encodable(value, name)
        return value

    def boolean(self, name: str) -> bool:
        value = self.take(name, type="boolean")
        if value is not None and not isinstance(value, bool):
            raise bad_request(f"{name} must be true or false", name)
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
        """Take a number of at least ``low``, or greater than ``low`` if ``above`` is set."""
        schema: dict[str, Any] = {}
        if self._schemas is not None:
            schema["type"] = "integer" if kind is int else "number"
            schema["exclusiveMinimum" if above else "minimum"] = low
            schema |= {} if high == math.inf else {"maximum": high}
        value = self.take(name, **schema)
        if value is None:
            return None
        is_number = isinstance(value, (int, float) if kind is float else int)
        out_of_range = not is_number or not low <= value <= high or (above and value == low)
        if out_of_range or isinstance(value, bool):
            expected = "an integer" if kind is int else "a number"
            minimum = "greater than" if above else "of at least"
            maximum = "" if high == math.inf else f" and at most {high}"
            raise bad_request(f"{name} must be {expected} {minimum} {low:g}{maximum}", name)
        try:
            return kind(value)
        except OverflowError:
            raise bad_request(f"{name} is too large for a number", name) from None

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.take(name, type="object")
        if self._schemas is not None:
            # What is read of it is a part of its own schema.
            value = SchemaProbe(value or {})
            self._schemas[name]["properties"] = value.schemas
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise bad_request(f"{name} must be an object", name)
        return value

    def texts(self, name: str, max_count: int) -> list[str] | None:
        array = {"type": "array", "maxItems": max_count, "items": {"type": "string"}}
        value = self.take(name, anyOf=[{"type": "string"}, array, {"type": "null"}])
        if value is None:
            return None
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise bad_request(f"{name} must be a string or a list of strings", name)
        if len(words) > max_count:
            raise bad_request(f"{name} accepts at most {max_count} strings", name)
        return [word for word in words if word] or None

    def option(
        self,
        row: RequestOption,
        name: str | None = None,
        *,
        low: float | None = None,
        high: float | None = None,
    ) -> Any:
        """Take an option of the model, by another name and with other limits if the API has them.

        Values that are the default are None, for models that do not know the option.
        """
        name = name or row.api or row.name
        if self._schemas is None and name not in self._remaining:
            return None
        lowest, highest = row.api_range or (row.low, row.high)
        low, high = lowest if low is None else low, highest if high is None else high
        if row.kind in ("whole", "number"):
            kind: type[int] | type[float] = int if row.kind == "whole" else float
            return self.number(name, kind, low, high, above=row.above)
        if row.kind == "flag":
            # One that has no default, or true, may be switched off.
            is_sent = self._schemas is None and self._remaining[name] is not None
            flag = self.boolean(name)
            return flag if is_sent and flag != row.default else None
        if row.kind == "text":
            return self.text(name, required=False)
        if row.kind == "words":
            return self.texts(name, int(high))
        mapping = self.mapping(name)
        return (_biases(name, mapping, int(high)) if row.kind == "biases" else mapping) or None

    def refuse(self, why: str, *names: str) -> None:
        """Refuse fields that ask for something unsupported."""
        for name in names:
            if self._remaining.pop(name, None):
                raise bad_request(f"{name}: {why}", name)

    def refuse_any(self, reasons: Mapping[str, str]) -> None:
        """Refuse fields, each for its own reason: every value but false asks for something."""
        for name, why in reasons.items():
            value = self._remaining.pop(name, None)
            if value is not None and value is not False and value not in ([], {}):
                raise bad_request(f"{name}: {why}", name, "unsupported_parameter")

    def length(self, name: str = "max_tokens", *, low: int = 1) -> int | None:
        """Take the longest answer that a request wants; -1 is none, as user interfaces send it."""
        numbers = {"type": "integer", "minimum": low, "maximum": INT32}
        value = self.take(name, anyOf=[numbers, {"const": -1}, {"type": "null"}])
        if value is None or (value == -1 and type(value) is int):
            return None
        if type(value) is not int or not low <= value <= INT32:
            what = f"{name} must be an integer from {low} to {INT32}, or -1 for no limit"
            raise bad_request(what, name)
        return value

    def unknown(self) -> frozenset[str]:
        return frozenset(self._remaining) - _IGNORED


def read_sampling(fields: Fields, stop: str = "stop", max_temperature: float = 2) -> dict[str, Any]:
    """Take the options that the API has, and return them under the names of the tensor contract."""
    fields.refuse_any(_REFUSED)
    names = {"stop_words": stop}
    lows, highs = {"seed": -_SEEDS}, {"temperature": max_temperature}
    options = {
        row.name: fields.option(
            row, names.get(row.name), low=lows.get(row.name), high=highs.get(row.name)
        )
        for row in _SAMPLING
    }
    if options["top_k"] is not None and options["top_k"] <= 0:
        options["top_k"] = None  # In vLLM's API this means all tokens.
    if options["seed"] is not None:
        # Interfaces, llama.cpp and vLLM mean any seed by -1; models take no other negative one.
        options["seed"] = None if options["seed"] == -1 else options["seed"] % _SEEDS
    return options


def read_template(
    fields: Fields, messages: Sequence[Mapping[str, Any]], *, prefills: bool = False
) -> dict[str, Any] | None:
    """Take what a chat template is told besides the messages, and how it ends the prompt.

    In an API that ``prefills``, a last message of the assistant is the beginning of the answer.
    """
    arguments = fields.option(OPTIONS["chat_template_kwargs"]) or {}
    begins = fields.take("add_generation_prompt", type="boolean")
    if begins not in (None, True, False) or type(begins) is int:
        raise bad_request("add_generation_prompt must be true or false", "add_generation_prompt")
    last = messages[-1]
    is_said = fields.boolean(_CONTINUES)
    if is_said and begins:
        raise bad_request(f"{_CONTINUES} and add_generation_prompt exclude each other", _CONTINUES)
    if is_said and last["role"] != "assistant":
        raise bad_request(f"{_CONTINUES} needs a last message of the assistant", _CONTINUES)
    is_begun = last["role"] == "assistant" and isinstance(last["content"], str)
    is_begun = is_begun and bool(last["content"]) and "tool_calls" not in last
    if is_said or (prefills and is_begun and not begins):
        arguments = {**arguments, "add_generation_prompt": False, _CONTINUES: True}
    elif begins is False:
        arguments = {**arguments, "add_generation_prompt": False}
    return arguments or None


def read_effort(fields: Fields, name: str) -> str | None:
    """Take how much a model is to think, which its chat template is told."""
    effort = fields.text(name, required=False)
    if effort is not None and not _EFFORT.fullmatch(effort):
        raise bad_request(f"{name} must be a word such as low, medium or high", name)
    return None if effort is None else str(effort)


def _biases(name: str, biases: dict[str, Any], most: int) -> dict[str, float]:
    low, high = BIASES

    def is_valid(token: str, bias: Any) -> bool:
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        return token.isascii() and token.isdecimal() and is_number and low <= bias <= high

    if len(biases) > most or not all(map(is_valid, biases, biases.values())):
        what = f"{name} must map token ids to numbers from {low} to {high}, at most {most} of them"
        raise bad_request(what, name)
    return biases


def read_tools(fields: Fields, messages: Any) -> Tools | None:
    """Take OpenAI's tool fields; return None if no tool may be called."""
    fields.refuse("deprecated: use tools and tool_choice", "functions", "function_call")
    return Tools.of(
        {
            "messages": messages,
            "tools": fields.take("tools", type="array", items={"type": "object"}),
            "tool_choice": fields.take("tool_choice"),
            "parallel_tool_calls": fields.take("parallel_tool_calls", type="boolean"),
        }
    )


def read_constraint(
    fields: Fields, response_format: Any, param: str = "response_format"
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the output constraint, from OpenAI's ``response_format`` or vLLM's fields.

    The second result maps the constraint's name to the field that it comes from.
    """
    structured = fields.mapping("structured_outputs")
    given: dict[str, tuple[str, Any]] = {}
    for name, option in _CONSTRAINTS.items():
        places = {
            f"structured_outputs.{name}": structured.pop(name, None),
            f"guided_{name}": fields.take(f"guided_{name}"),
        }
        for place, value in places.items():
            if value is not None and option not in given:
                given[option] = place, value
    if unknown := [name for name, value in structured.items() if value is not None]:
        raise bad_request(f"{str(unknown[0])[:40]!r} is not supported", "structured_outputs")
    for place, value in given.values():
        if value in ("", []):
            raise bad_request(f"{place} is empty: it cannot constrain an answer", place)
    formatted, sent = read_format(response_format, param)
    options = formatted | {option: value for option, (_, value) in given.items()}
    sent |= {option: place for option, (place, _) in given.items()}
    if len(given) + len(formatted) > 1:
        raise bad_request(f"only one of {', '.join(sent.values())} can be used", param)
    if isinstance(options.get("json_schema"), dict):
        options["json_schema"] = json.dumps(options["json_schema"])
    return options, sent


def read_format(value: Any, param: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Read ``response_format``, by whatever name an API has for it, as :func:`read_constraint`."""
    kind = value.get("type") if isinstance(value, dict) else value
    if kind is None or kind == "text":
        return {}, {}
    if kind == "json_object" and not (isinstance(value, dict) and value.get("schema")):
        return {"json_object": True}, {"json_object": param}
    if kind == "json_object" and isinstance(value["schema"], dict):
        # As llama.cpp and Together have it: an object, and of this schema.
        return {"json_schema": json.dumps(value["schema"])}, {"json_schema": param}
    # Chats nest the schema one level deeper than responses.
    parent = value.get("json_schema", value) if kind == "json_schema" else None
    schema = parent.get("schema") if isinstance(parent, dict) else None
    if not isinstance(schema, dict):
        what = f"{param} must be text, json_object, or json_schema with a schema"
        raise bad_request(what, param)
    return {"json_schema": json.dumps(schema)}, {"json_schema": param}


def read_messages(
    value: Any, name: str = "messages"
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a conversation in the form that chat templates expect, and its images as options."""
    if not isinstance(value, list) or not value:
        raise bad_request(f"{name} must be a list with at least one message", name)
    images: list[str] = []
    arguments = BoundedJson()
    messages = [
        _message(each, f"{name}[{index}]", images, arguments) for index, each in enumerate(value)
    ]
    most = int(OPTIONS[IMAGE_URL.name].high)
    if len(images) > most:
        raise bad_request(f"{name} has {len(images)} images: send at most {most}", name)
    return messages, {IMAGE_URL.name: images} if images else {}


def _message(message: Any, where: str, images: list[str], arguments: BoundedJson) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}", where)
    content, calls = message.get("content"), message.get("tool_calls")
    result: dict[str, Any] = {"role": ROLES[role], "content": None}
    if role == "assistant" and calls:
        if not isinstance(calls, list):
            raise bad_request(f"{where}.tool_calls must be a list", where)
        result["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]", arguments)
            for index, call in enumerate(calls)
        ]
    elif content is None and role == "assistant":
        content = ""
    if content is not None or "tool_calls" not in result:
        result["content"] = _read_content(content, f"{where}.content", images)
    if role == "assistant":
        result |= _thoughts(message, result)
    names = ("tool_call_id", "name") if result["role"] == "tool" else ()
    return result | {name: message[name] for name in names if isinstance(message.get(name), str)}


def _thoughts(message: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, str]:
    """Return what the model thought in an earlier turn, by the names that templates use."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(thoughts, str):
        return {}
    # gpt-oss's template refuses it beside a text and calls, and ignores it without calls.
    both = result["content"] and "tool_calls" in result
    return {"reasoning_content": thoughts} | ({} if both else {"thinking": thoughts})


def _call(call: Any, where: str, reader: BoundedJson) -> dict[str, Any]:
    """Return an earlier tool call for the chat template, with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must be a function call", where)
    name, arguments = function["name"], function.get("arguments")
    try:
        parsed = reader.parse(arguments or "{}") if isinstance(arguments, str) else arguments
        why = ""
    except (ValueError, RecursionError) as error:
        parsed, why = None, f" ({error})"
    if not isinstance(parsed, dict):
        what = f"{where}: the arguments of {name!r:.80} are not a JSON object{why:.200}"
        raise bad_request(what, where)
    check_depth(parsed)
    result = {"type": "function", "function": {"name": name, "arguments": parsed}}
    return {"id": call["id"], **result} if isinstance(call.get("id"), str) else result


def read_text(content: Any, where: str) -> str:
    """Return a message's text, which may be split into parts."""
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, where) for part in _parts(content, where))


def _parts(content: Any, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts", where)
    return content


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind in ("text", "input_text", "output_text") else None
    if not isinstance(text, str):
        what = f"{where} has a part of type {str(kind)[:40]!r}: only text"
        raise bad_request(f"{what} and images are supported", where)
    return text


def _read_content(content: Any, where: str, images: list[str]) -> str | list[dict[str, str]]:
    """Return a message's text, or its parts if some are images, which are put into a list."""
    is_image = [_is_image(part) for part in content] if isinstance(content, list) else []
    if not any(is_image):
        return read_text(content, where)
    parts = []
    for part, shows_image in zip(content, is_image, strict=True):
        if shows_image:
            images.append(_image(part, where))
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": _part_text(part, where)})
    return parts


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image_url", "input_image", "image")


def _image(part: Mapping[str, Any], where: str) -> str:
    """Return an image as an address that has it inside: OpenAI's chats, its responses, Anthropic's.

    Other addresses would have the server open what its users name, in networks that are not theirs.
    """
    source = part.get("source") or part.get("image_url")
    url = source.get("url") if isinstance(source, dict) else source
    if isinstance(source, dict) and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    if not isinstance(url, str) or not _DATA_URL.fullmatch(url):
        what = f"{where} has an image that is not in the request: send it as data:image/png;base64,"
        raise bad_request(what, where)
    return url


def is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and token in _TOKEN_IDS for token in value)
    )


def check_encodable(text: str, where: str, param: str | None = None) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        problem = f"{where} has a character that UTF-8 cannot encode"
        raise bad_request(problem, param or where) from None


def without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
