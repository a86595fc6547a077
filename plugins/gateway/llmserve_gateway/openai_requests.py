"""Requests for chats and completions of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmserve_gateway.errors import bad_request
from llmserve_gateway.fields import (
    MAX_ANSWERS,
    Asked,
    Fields,
    given,
    read_form,
    read_messages,
    read_sampling,
    read_tools,
)

_MOST_LOGPROBS = 20
_TOKEN = range(2**31)


def read_chat(content: Mapping[str, Any]) -> Asked:
    """Read the body of ``/v1/chat/completions``."""
    fields = Fields(content)
    messages = read_messages(fields.take("messages"))
    options = _sampling(fields)
    tokens = fields.number("max_completion_tokens", int, 1)
    limit = fields.number("max_tokens", int, 1)
    options["max_tokens"] = limit if tokens is None else tokens
    wants_logprobs = fields.boolean("logprobs")
    alternatives = fields.number("top_logprobs", int, 0, _MOST_LOGPROBS)
    if alternatives is not None and not wants_logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if wants_logprobs:
        options["logprobs"] = alternatives or 0
    fields.refuse("only text can be answered", "audio")
    if (modalities := fields.take("modalities")) not in (None, ["text"]):
        raise bad_request(f"modalities: only text can be answered, not {modalities!r:.80}",
                          "modalities")  # fmt: skip
    options["messages"] = messages
    options["chat_template_kwargs"] = fields.mapping("chat_template_kwargs") or None
    if tools := read_tools(fields, messages):
        options = tools.options(given(options))
    return _asked(fields, options, [""], logprobs=wants_logprobs, tools=tools)


def read_completion(content: Mapping[str, Any]) -> Asked:
    """Read the body of ``/v1/completions``."""
    fields = Fields(content)
    prompts = read_prompts(fields.take("prompt"))
    options = _sampling(fields)
    alternatives = fields.number("logprobs", int, 0, _MOST_LOGPROBS)
    echo = fields.boolean("echo")
    # Who only wants to know how likely a text is asks for no token behind it.
    tokens = fields.number("max_tokens", int, 0 if echo else 1)
    options["max_tokens"] = tokens or (1 if tokens == 0 else None)
    options["logprobs"] = alternatives
    if echo:
        options["prompt_logprobs"] = alternatives
    fields.refuse("models only go on from a prompt", "suffix")
    best_of = fields.number("best_of", int, 1)
    if best_of not in (None, 1) and best_of != content.get("n"):
        raise bad_request("best_of other than n cannot be done", "best_of")
    return _asked(
        fields,
        options,
        prompts,
        echo=echo,
        silent=tokens == 0,
        logprobs=alternatives is not None,
    )


def _asked(fields: Fields, options: dict[str, Any], prompts: Any, **extra: Any) -> Asked:
    model = fields.text("model")
    count = fields.number("n", int, 1, MAX_ANSWERS) or 1
    if count * len(prompts) > MAX_ANSWERS:
        raise bad_request(f"a request has at most {MAX_ANSWERS} answers, all prompts together", "n")
    stream = fields.boolean("stream")
    told = fields.mapping("stream_options")
    if told and not stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    streamed = Fields(told)
    return Asked(
        model=model,
        prompts=prompts,
        options=given(options),
        choices_each=count,
        stream=stream,
        include_usage=streamed.boolean("include_usage"),
        continuous_usage=streamed.boolean("continuous_usage_stats"),
        unknown=fields.rest(),
        **extra,
    )


def _sampling(fields: Fields) -> dict[str, Any]:
    return {**read_sampling(fields), **read_form(fields, fields.take("response_format"))}


def read_prompts(value: Any) -> list[str] | list[list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if len(value) <= MAX_ANSWERS and all(isinstance(prompt, str) for prompt in value):
            return value
        if _are_ids(value):
            return [value]
        if len(value) <= MAX_ANSWERS and all(_are_ids(prompt) for prompt in value):
            return value
    raise bad_request(
        f"prompt has to be a text, token ids, or a list of at most {MAX_ANSWERS} of either",
        "prompt",
    )


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(one) is int and one in _TOKEN for one in value)
    )
