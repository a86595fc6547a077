"""Requests of the OpenAI API for chats and completions."""

from __future__ import annotations

from typing import Any

from llmserve.runtime.contract import OPTIONS, SUFFIX
from llmserve_gateway.conversations import MESSAGES, Conversation, read_messages
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import (
    TOKEN_IDS,
    Body,
    Field,
    Values,
    any_text,
    flag,
    is_ids,
    length,
    option,
    part,
    reads,
    refused,
    whole,
)
from llmserve_gateway.generation_fields import (
    CACHE_KEY,
    CONSTRAINTS,
    FORMAT,
    MODEL,
    PRIORITY,
    REFUSED,
    STREAM,
    TEMPLATE,
    TOOLS,
    effort,
    read_constraint,
    read_template,
    read_tools,
    sampling,
    unaffected,
)
from llmserve_gateway.text_requests import MAX_ANSWERS, ParsedRequest, Thinking

BUDGET = OPTIONS["thinking_token_budget"].name
_MAX_BYTES = 16 << 20
"""How large a request may be together with its copies for several answers."""
_TEXT = {"type": "string", "minLength": 1}


def read_prompts(value: Any, name: str) -> list[str] | list[list[int]]:
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
        f"{name} must be a string, token ids, or a list of at most {MAX_ANSWERS} of either", name
    )


_COUNT = whole("n", "How many answers to give to each prompt.", 1, MAX_ANSWERS)
_USAGE = flag("include_usage", "Send the numbers of tokens at the end of the stream.")
_USAGES = flag("continuous_usage_stats", "Send them with every piece.")
_STREAM_OPTIONS = part("stream_options", "What a stream has besides.", Body(_USAGE, _USAGES))
_ANSWERS: tuple[Field[Any], ...] = (MODEL, _COUNT, STREAM, _STREAM_OPTIONS)
_SHARED: tuple[Field[Any], ...] = (
    FORMAT, *CONSTRAINTS, CACHE_KEY, PRIORITY, *REFUSED, *unaffected(CACHE_KEY.name),
)  # fmt: skip
_MAX_TOKENS = length("max_tokens", "The longest answer, in tokens.")

CONVERSATION: Field[Conversation] = Field(
    "messages", "The conversation, which the model answers.", read_messages, MESSAGES,
    required=True,
)  # fmt: skip
_COMPLETION_TOKENS = length("max_completion_tokens", "The same, by its newer name.")
_WITH_LOGPROBS = flag("logprobs", "Return the log-probabilities of the answer's tokens.")
_TOP_LOGPROBS = option(OPTIONS["logprobs"], "top_logprobs", passed=False)
_REASONING_EFFORT = effort("reasoning_effort")


def _no_search(value: Any, name: str) -> None:
    del value
    # Even an empty object asks for a search.
    raise bad_request(f"{name}: this server does not search the web", name)


def _text_only(value: Any, name: str) -> None:
    if value != ["text"]:
        raise bad_request(f"{name}: only text output is supported, not {value!r:.80}", name)


CHAT = Body(
    CONVERSATION,
    *_ANSWERS,
    _MAX_TOKENS,
    _COMPLETION_TOKENS,
    *sampling(),
    _WITH_LOGPROBS,
    _TOP_LOGPROBS,
    *TOOLS,
    _REASONING_EFFORT,
    *TEMPLATE,
    *_SHARED,
    *refused("only text output is supported", "audio"),
    Field("modalities", "Only text output is supported.", _text_only, {"enum": [["text"]]}),
    Field("web_search_options", "Refused: This server does not search the web.", _no_search,
          {"enum": []}, use="refused"),
)  # fmt: skip


@reads(CHAT)
def read_chat(values: Values) -> ParsedRequest:
    conversation, options = values[CONVERSATION], values.options
    messages = conversation.messages
    constraint, sent = read_constraint(values, values[FORMAT])
    options |= constraint
    _set_length(options, values[_MAX_TOKENS], values[_COMPLETION_TOKENS])
    wants_logprobs, top_logprobs = values[_WITH_LOGPROBS], values[_TOP_LOGPROBS]
    if top_logprobs is not None and not wants_logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if wants_logprobs:
        options["logprobs"] = top_logprobs or 0
    options |= conversation.options | read_template(values, messages)
    if tools := read_tools(values, messages):
        options = tools.options(options)
    thinking = Thinking(effort=values[_REASONING_EFFORT])
    return _parsed(
        values,
        options,
        [""],
        logprobs=wants_logprobs,
        tools=tools,
        thinking=thinking,
        sent=sent,
    )


_IDS_OR_TEXT = [
    {"type": "array", "minItems": 1, "maxItems": MAX_ANSWERS, "items": item}
    for item in ({"type": "string"}, TOKEN_IDS)
]
_PROMPT: Field[Any] = Field(
    "prompt", "What the model continues: a text or token ids, or several.", read_prompts,
    {"anyOf": [{"type": "string"}, TOKEN_IDS, *_IDS_OR_TEXT]}, required=True,
)  # fmt: skip
_LOGPROBS = option(OPTIONS["logprobs"])
# A client that only wants the log-probabilities of a text asks for zero new tokens.
_MAX_NEW_TOKENS = length("max_tokens", "The longest answer, in tokens; 0 needs echo.", low=0)
_ECHO = flag("echo", "Return the prompt before its continuation.")
_BEST_OF = whole("best_of", "Either 1 or n.", 1)
_SUFFIX = any_text(
    "suffix", "What follows: the model fills in what is between the prompt and it, if it can."
)

COMPLETION = Body(
    _PROMPT,
    *_ANSWERS,
    _MAX_NEW_TOKENS,
    *sampling(without=[BUDGET]),
    _LOGPROBS,
    _ECHO,
    _BEST_OF,
    _SUFFIX,
    *_SHARED,
    *refused("only chats tell the thinking from the answer", BUDGET),
)


@reads(COMPLETION)
def read_completion(values: Values) -> ParsedRequest:
    options, top_logprobs, echo = values.options, values[_LOGPROBS], values[_ECHO]
    constraint, sent = read_constraint(values, values[FORMAT])
    options |= constraint
    max_tokens = values[_MAX_NEW_TOKENS]
    if max_tokens == 0 and not echo:
        # It says what it needs.
        _MAX_TOKENS.read(max_tokens)
    _set_length(options, 1 if max_tokens == 0 else max_tokens)
    if echo and top_logprobs is not None:
        options["prompt_logprobs"] = top_logprobs
    if values[_BEST_OF] not in (None, 1, values[_COUNT]):
        raise bad_request("best_of must be 1 or equal to n", "best_of")
    prompts = values[_PROMPT]
    if values[_SUFFIX]:
        if echo:
            raise bad_request("echo: what is around a gap is not sent back", "echo")
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise bad_request("suffix needs a prompt of text, not of token ids", "suffix")
        options[SUFFIX] = values[_SUFFIX]
    return _parsed(
        values,
        options,
        prompts,
        echo=echo,
        echo_only=max_tokens == 0,
        logprobs=top_logprobs is not None,
        sent=sent,
    )


def _set_length(options: dict[str, Any], usual: int | None, newer: int | None = None) -> None:
    if (most := usual if newer is None else newer) is not None:
        options["max_tokens"] = most


def _parsed(values: Values, options: dict[str, Any], prompts: Any, **extra: Any) -> ParsedRequest:
    count = values[_COUNT] or 1
    if count * len(prompts) > MAX_ANSWERS:
        raise bad_request(f"a request has at most {MAX_ANSWERS} answers for all prompts", "n")
    stream, more = values[STREAM], values[_STREAM_OPTIONS]
    if not more.is_empty and not stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    request = ParsedRequest(
        model=values[MODEL],
        prompts=prompts,
        options=options,
        answers_per_prompt=count,
        stream=stream,
        include_usage=more[_USAGE],
        continuous_usage=more[_USAGES],
        session=values[CACHE_KEY],
        unknown=values.unknown,
        priority=values[PRIORITY],
        **extra,
    )
    check_copies(request, "n" if count > 1 else "prompt")
    return request


def check_copies(request: ParsedRequest, param: str) -> None:
    """Refuse a large request of which a model would get many copies."""
    if request.answer_count > 1 and request.sent_bytes > _MAX_BYTES:
        what = f"{param}: the model would get all of this request {request.answer_count} times"
        raise ApiError(413, f"{what}, over {_MAX_BYTES >> 20} MB", param=param,
                       code="request_too_large")  # fmt: skip
