"""The fields that all APIs for generated text share, and what they mean together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmserve.client import Tools
from llmserve.runtime.contract import API_NAMES, CLASSES, OPTIONS, RequestOption
from llmserve_gateway.errors import bad_request
from llmserve_gateway.fields import (
    STRING,
    Body,
    Field,
    Values,
    check_encodable,
    check_flag,
    flag,
    ignored,
    needed,
    option,
    part,
    refused,
    refused_if_sent,
    said,
    text,
    whole,
)

_SEEDS = 2**63
_EFFORT = re.compile(r"[a-z]{1,16}")
# Those of models that answer with values have requests of their own.
_SAMPLING = tuple(
    OPTIONS[name] for name in API_NAMES if OPTIONS[name].group not in ("reading", "vector")
)
# The names of output constraints in vLLM's API, and those of the tensor contract.
_CONSTRAINTS = {row.api: row for row in OPTIONS.values() if row.api and row.group == "forms"}

MODEL = needed(text("model", "The name of a model."))
STREAM = flag("stream", "Send the answer in pieces, as events.")
PRIORITY = whole(
    "priority", "The class of the request: a lower number goes first.", CLASSES[0], CLASSES[-1]
)

IGNORED = (
    "metadata", "user", "store", "service_tier", "prompt_cache_key", "safety_identifier",
    "prompt_cache_retention", "prediction", "verbosity",
)  # fmt: skip
"""What is accepted without any effect on the answer."""

_LONGEST_KEY = 512
"""Characters of a ``prompt_cache_key``; OpenAI's own service takes 64."""


def _cache_key(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_KEY:
        what = f"{name} must be a text of at most {_LONGEST_KEY} characters"
        raise bad_request(what, name)
    check_encodable(value, name)
    return value


CACHE_KEY: Field[str] = Field(
    "prompt_cache_key",
    "Names a session: what is computed of it is kept longer, and of several replicas, the one that "
    "has answered it is asked again.",
    _cache_key, {**STRING, "maxLength": _LONGEST_KEY}, absent="",
)  # fmt: skip

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
REFUSED = tuple(row for name, why in _REFUSED.items() for row in refused_if_sent(why, name))


# Sampling


def sampling(
    *, stop: str = "stop", max_temperature: float = 2, without: Sequence[str] = ()
) -> Iterator[Field[Any]]:
    """The options that an API has as they are."""
    for row in _SAMPLING:
        if row.name == "stop_words":
            yield option(row, stop)
        elif row.name == "temperature":
            yield option(row, high=max_temperature)
        elif row.name == "top_k":
            # In vLLM's API this means all tokens.
            yield option(row, then=lambda top: top if top > 0 else None)
        elif row.name == "seed":
            yield option(row, low=-_SEEDS, then=_seed)
        elif row.name not in without:
            yield option(row)


def _seed(seed: int) -> int | None:
    # Interfaces, llama.cpp and vLLM mean any seed by -1; models take no other negative one.
    return None if seed == -1 else seed % _SEEDS


# How a chat template ends the prompt, and what it is told

_KWARGS = option(OPTIONS["chat_template_kwargs"])
_BEGINS = said("add_generation_prompt", "Whether the prompt ends where an answer begins.")
_CONTINUES = flag("continue_final_message", "Continue the last message, which is the assistant's.")
TEMPLATE: tuple[Field[Any], ...] = (_KWARGS, _BEGINS, _CONTINUES)


def read_template(
    values: Values, messages: Sequence[Mapping[str, Any]], *, prefills: bool = False
) -> dict[str, Any]:
    """Return what a chat template is told besides the messages, and how it ends the prompt.

    In an API that ``prefills``, a last message of the assistant is the beginning of the answer.
    """
    arguments, begins, is_said = values[_KWARGS] or {}, values[_BEGINS], values[_CONTINUES]
    last, name = messages[-1], _CONTINUES.name
    if is_said and begins:
        raise bad_request(f"{name} and {_BEGINS.name} exclude each other", name)
    if is_said and last["role"] != "assistant":
        raise bad_request(f"{name} needs a last message of the assistant", name)
    is_begun = last["role"] == "assistant" and isinstance(last["content"], str)
    is_begun = is_begun and bool(last["content"]) and "tool_calls" not in last
    if is_said or (prefills and is_begun and not begins):
        arguments = {**arguments, _BEGINS.name: False, name: True}
    elif begins is False:
        arguments = {**arguments, _BEGINS.name: False}
    return {"chat_template_kwargs": arguments} if arguments else {}


def effort(name: str) -> Field[str | None]:
    """How much a model is to think, which its chat template is told."""

    def check(value: Any, name: str) -> str:
        if not isinstance(value, str) or not _EFFORT.fullmatch(value):
            raise bad_request(f"{name} must be a word such as low, medium or high", name)
        return value

    what = "How much the model thinks: a word such as low, medium or high; none for not at all."
    return Field(name, what, check, {**STRING, "pattern": f"^{_EFFORT.pattern}$"})


# Tools in OpenAI's format


def _tools(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise bad_request(f"{name} must be a list", name)
    return value


def _choice(value: Any, name: str) -> Any:
    if not isinstance(value, dict) and value not in _CHOICES:
        raise bad_request(f"{name} must be {', '.join(_CHOICES)}, or name a function", name)
    return value


_CHOICES = ("none", "auto", "required")
# What they have inside is checked by what shows them to a model.
TOOL_LIST: Field[list[Any] | None] = Field(
    "tools", "The functions that an answer may call.", _tools,
    {"type": "array", "items": {"type": "object"}},
)  # fmt: skip
_TOOL_CHOICE: Field[Any] = Field(
    "tool_choice", "Whether an answer calls a function, and which.", _choice,
    {"anyOf": [{"enum": [*_CHOICES]}, {"type": "object"}]},
)  # fmt: skip
_PARALLEL = said("parallel_tool_calls", "Whether an answer may have several calls.")
TOOLS: tuple[Field[Any], ...] = (
    TOOL_LIST, _TOOL_CHOICE, _PARALLEL,
    *refused("deprecated: use tools and tool_choice", "functions", "function_call"),
)  # fmt: skip


def read_tools(values: Values, messages: Any) -> Tools | None:
    """Return the tools of a request; None if no tool may be called."""
    fields = (TOOL_LIST, _TOOL_CHOICE, _PARALLEL)
    return Tools.of({"messages": messages, **{field.name: values[field] for field in fields}})


# Constraints on the answer


@dataclass(frozen=True)
class Format:
    """The form that a request wants of its answer, as the request says it and as an option."""

    given: Any
    options: Mapping[str, Any]
    label: str
    """What errors call the field."""

    @property
    def sent(self) -> dict[str, str]:
        return dict.fromkeys(self.options, self.label)


def answer_format(name: str, label: str = "") -> Field[Format | None]:
    """OpenAI's ``response_format``, by whatever name an API has for it."""
    what = "The form of the answer: text, json_object, or json_schema with a schema."
    kinds = {"enum": ["text", "json_object", "json_schema"]}
    content = {"type": "object", "properties": {"type": kinds}}
    return Field(name, what, _format, {"anyOf": [content, kinds]}, label=label)


def _format(value: Any, label: str) -> Format:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind is None or kind == "text":
        return Format(value, {}, label)
    if kind == "json_object" and not (isinstance(value, dict) and value.get("schema")):
        return Format(value, {"json_object": True}, label)
    if kind == "json_object":
        # As llama.cpp and Together have it: an object, and of this schema.
        schema = value["schema"]
    else:
        # Chats nest the schema one level deeper than responses.
        parent = value.get("json_schema", value) if kind == "json_schema" else None
        schema = parent.get("schema") if isinstance(parent, dict) else None
    if not isinstance(schema, dict):
        what = f"{label} must be text, json_object, or json_schema with a schema"
        raise bad_request(what, label)
    return Format(value, {"json_schema": json.dumps(schema)}, label)


def _constraint(row: RequestOption, name: str, label: str = "") -> Field[Any]:
    kind, texts = {"type": "string", "minLength": 1}, {"type": "array", "items": STRING}
    schema: dict[str, Any] = kind
    if row.kind == "flag":
        schema = {"type": "boolean"}
    elif row.json:
        schema = {"anyOf": [{"type": "object"}, kind]}
    elif row.kind == "words":
        schema = {"anyOf": [kind, {**texts, "minItems": 1, "maxItems": int(row.high)}]}

    def check(value: Any, name: str) -> Any:
        if row.kind == "flag":
            return check_flag(value, name)
        if value in ("", []):
            raise bad_request(f"{name} is empty: it cannot constrain an answer", name)
        if row.json and isinstance(value, dict):
            return json.dumps(value)
        if row.kind == "words" and isinstance(value, list):
            if not all(isinstance(each, str) for each in value) or len(value) > row.high:
                raise bad_request(f"{name} must be a list of up to {row.high} texts", name)
            return value
        if not isinstance(value, str):
            lists = ", or a list of texts" if row.kind == "words" else ""
            what = "a schema, or its text" if row.json else f"a text{lists}"
            raise bad_request(f"{name} must be {what}", name)
        return value

    return Field(name, row.help, check, schema, label=label)


FORMAT = answer_format("response_format")
_STRUCTURED = {
    row.name: _constraint(row, name, f"structured_outputs.{name}")
    for name, row in _CONSTRAINTS.items()
}
_GUIDED = {row.name: _constraint(row, f"guided_{name}") for name, row in _CONSTRAINTS.items()}
_STRUCTURED_OUTPUTS = part(
    "structured_outputs",
    "A constraint on the answer, as in vLLM.",
    Body(*_STRUCTURED.values(), closed=True),
)
CONSTRAINTS: tuple[Field[Any], ...] = (_STRUCTURED_OUTPUTS, *_GUIDED.values())


def read_constraint(
    values: Values, wanted: Format | None, label: str = FORMAT.name
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the output constraint, from OpenAI's ``response_format`` or vLLM's fields.

    The second result maps the constraint's name to the field that it comes from.
    """
    structured = values[_STRUCTURED_OUTPUTS]
    options = dict(wanted.options) if wanted else {}
    sent = wanted.sent if wanted else {}
    count = len(options)
    for name, guided in _GUIDED.items():
        places = (structured, _STRUCTURED[name]), (values, guided)
        for found, field in places:
            if found[field] is not None:
                count += 1
                options[name], sent[name] = found[field], field.label or field.name
                break
    if count > 1:
        raise bad_request(f"only one of {', '.join(sent.values())} can be used", label)
    return options, sent


def unaffected(*names: str) -> Iterator[Field[None]]:
    """The fields of :data:`IGNORED`, besides those that this API reads itself."""
    return ignored(*(name for name in IGNORED if name not in names))
