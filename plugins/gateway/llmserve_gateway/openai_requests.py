"""Reading of chat and completion requests of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmserve.runtime.contract import OPTIONS
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import (
    MAX_ANSWERS,
    Fields,
    ParsedRequest,
    Thinking,
    is_ids,
    read_constraint,
    read_effort,
    read_messages,
    read_sampling,
    read_template,
    read_tools,
    without_none,
)

_LOGPROBS = OPTIONS["logprobs"]
BUDGET = OPTIONS["thinking_token_budget"].name
_MAX_BYTES = 16 << 20
"""How large a request may be together with its copies for several answers."""


def read_chat(content: Mapping[str, Any]) -> ParsedRequest:
    fields = Fields(content)
    messages, images = read_messages(fields.take("messages"))
    options, sent = _sampling(fields)
    max_completion_tokens = fields.length("max_completion_tokens")
    max_tokens = fields.length()
    options["max_tokens"] = max_tokens if max_completion_tokens is None else max_completion_tokens
    wants_logprobs = fields.boolean("logprobs")
    top_logprobs = fields.option(_LOGPROBS, "top_logprobs")
    if top_logprobs is not None and not wants_logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if wants_logprobs:
        options["logprobs"] = top_logprobs or 0
    fields.refuse("only text output is supported", "audio")
    if fields.take("web_search_options") is not None:
        # Even an empty object asks for a search.
        raise bad_request(
            "web_search_options: this server does not search the web", "web_search_options"
        )
    if (modalities := fields.take("modalities")) not in (None, ["text"]):
        raise bad_request(f"modalities: only text output is supported, not {modalities!r:.80}",
                          "modalities")  # fmt: skip
    options |= {"messages": messages, **images}
    options["chat_template_kwargs"] = read_template(fields, messages)
    thinking = Thinking(effort=read_effort(fields, "reasoning_effort"))
    if tools := read_tools(fields, messages):
        options = tools.options(without_none(options))
    return _parsed(
        fields,
        options,
        [""],
        logprobs=wants_logprobs,
        tools=tools,
        thinking=thinking,
        sent=sent,
    )


def read_completion(content: Mapping[str, Any]) -> ParsedRequest:
    fields = Fields(content)
    fields.refuse("only chats tell the thinking from the answer", BUDGET)
    prompts = read_prompts(fields.take("prompt"))
    options, sent = _sampling(fields)
    top_logprobs = fields.option(_LOGPROBS)
    echo = fields.boolean("echo")
    # A client that only wants the log-probabilities of a text asks for zero new tokens.
    max_tokens = fields.length(low=0 if echo else 1)
    options["max_tokens"] = max_tokens or (1 if max_tokens == 0 else None)
    options["logprobs"] = top_logprobs
    if echo:
        options["prompt_logprobs"] = top_logprobs
    fields.refuse("models only continue a prompt", "suffix")
    best_of = fields.number("best_of", int, 1)
    if best_of not in (None, 1) and best_of != content.get("n"):
        raise bad_request("best_of must be 1 or equal to n", "best_of")
    return _parsed(
        fields,
        options,
        prompts,
        echo=echo,
        echo_only=max_tokens == 0,
        logprobs=top_logprobs is not None,
        sent=sent,
    )


def _parsed(fields: Fields, options: dict[str, Any], prompts: Any, **extra: Any) -> ParsedRequest:
    model = fields.text("model")
    count = fields.number("n", int, 1, MAX_ANSWERS) or 1
    if count * len(prompts) > MAX_ANSWERS:
        raise bad_request(f"a request has at most {MAX_ANSWERS} answers for all prompts", "n")
    stream = fields.boolean("stream")
    stream_options = fields.mapping("stream_options")
    if stream_options and not stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    stream_fields = Fields(stream_options)
    request = ParsedRequest(
        model=model,
        prompts=prompts,
        options=without_none(options),
        answers_per_prompt=count,
        stream=stream,
        include_usage=stream_fields.boolean("include_usage"),
        continuous_usage=stream_fields.boolean("continuous_usage_stats"),
        unknown=fields.unknown(),
        **extra,
    )
    if request.answer_count > 1 and request.sent_bytes > _MAX_BYTES:
        param = "n" if count > 1 else "prompt"
        what = f"{param}: the model would get all of this request {request.answer_count} times"
        raise ApiError(413, f"{what}, over {_MAX_BYTES >> 20} MB", param=param,
                       code="request_too_large")  # fmt: skip
    return request


def _sampling(fields: Fields) -> tuple[dict[str, Any], dict[str, str]]:
    constraint, sent = read_constraint(fields, fields.take("response_format"))
    return {**read_sampling(fields), **constraint}, sent


def read_prompts(value: Any) -> list[str] | list[list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if len(value) <= MAX_ANSWERS and all(isinstance(prompt, str) for prompt in value):
            return value
        if is_ids(value):
            return [value]
        if len(value) <= MAX_ANSWERS and all(is_ids(prompt) for prompt in value):
            return value
    raise bad_request(
        f"prompt must be a string, token ids, or a list of at most {MAX_ANSWERS} of either",
        "prompt",
    )
