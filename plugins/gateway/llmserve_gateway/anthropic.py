"""Anthropic's Messages API: ``/v1/messages`` and its ``count_tokens``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from llmserve.client import Completion, Piece, ToolCall, Tools
from llmserve.runtime.contract import GENERATE, INT32, OPTIONS
from llmserve_gateway.conversations import (
    CONTENT,
    Conversation,
    list_of,
    message_schema,
    read_messages,
    read_text,
)
from llmserve_gateway.errors import ApiError, ContextError, bad_request
from llmserve_gateway.fields import (
    Body,
    Field,
    Values,
    check_mapping,
    needed,
    option,
    part,
    reads,
    refused,
)
from llmserve_gateway.generation_fields import (
    MODEL,
    REFUSED,
    STREAM,
    TEMPLATE,
    answer_format,
    effort,
    read_template,
    sampling,
    unaffected,
)
from llmserve_gateway.openai_answers import dump, dump_text, without_stop_word
from llmserve_gateway.reply import RequestRecord
from llmserve_gateway.text_requests import ParsedRequest, Thinking
from llmserve_gateway.usage import CACHED, Usage

_REASONS = {"stop": "end_turn", "length": "max_tokens", "cancelled": "max_tokens",
            "tool_calls": "tool_use"}  # fmt: skip
_TOOL_CHOICES = {None: None, "auto": "auto", "any": "required", "tool": "required", "none": "none"}
_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
_PAGE, _LARGEST_PAGE = 20, 1000
"""How many models a list has, if not said, and at most."""
_TEXT_EVENT = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":'
)


def _conversation(value: Any, name: str) -> Conversation:
    items = value if isinstance(value, list) else []
    roles = [item.get("role") for item in items if isinstance(item, dict)]
    if any(role not in ("user", "assistant") for role in roles):
        raise bad_request("roles must be user or assistant: for others see system", name)
    return read_messages([message for item in items for message in _messages(item)], name)


def _thinking(content: Any, name: str) -> Thinking:
    value = check_mapping(content, name)
    kind, budget = value.get("type"), value.get("budget_tokens")
    if kind not in (None, *_THINKING):
        raise bad_request(f"{name} must be enabled, adaptive or disabled", name)
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)
                               or not 1 <= budget <= INT32):  # fmt: skip
        raise bad_request(f"{name}.budget_tokens must be an integer of at least 1", name)
    if kind != "enabled":
        # A model that may think but need not is what every model here is.
        return Thinking(False if kind == "disabled" else None)
    return Thinking(True, required_by=name, budget=budget)


def _functions(tools: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise bad_request(f"{name} must be a list", name)
    functions = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
            raise bad_request(f"{name}[{index}] must be a tool of type custom", name)
        schema = {"parameters": tool.get("input_schema")}
        text = tool.get("description")
        description = {"description": text} if isinstance(text, str) else {}
        functions.append({"name": tool.get("name"), **description, **schema})
    return functions


def _choice(content: Any, name: str) -> Mapping[str, Any]:
    choice = check_mapping(content, name)
    kind = choice.get("type")
    if not (kind is None or isinstance(kind, str)) or kind not in _TOOL_CHOICES:
        raise bad_request(f"{name} must be auto, any, tool or none", name)
    if kind == "tool" and not isinstance(choice.get("name"), str):
        raise bad_request(f"{name} must name the tool", name)
    return choice


def _one_of(*kinds: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": {"enum": [*kinds, None]}, **more}}


_THINKING = ("enabled", "disabled", "adaptive")
_BUDGET = {"type": ["integer", "null"], "minimum": 1, "maximum": INT32}
_MESSAGES: Field[Conversation] = Field(
    "messages", "The conversation, which the model answers or continues.", _conversation,
    list_of(
        message_schema(required=["content"], content=CONTENT, roles=["user", "assistant"]),
        message_schema(required=[], content={"anyOf": [CONTENT, {"type": "null"}]},
                       roles=["assistant"]),
    ),
    required=True,
)  # fmt: skip
_SYSTEM: Field[str | None] = Field(
    "system", "What the system says before the conversation.", read_text, CONTENT
)
_MOST = option(OPTIONS["max_tokens"])
_THINKS: Field[Thinking] = Field(
    "thinking", "Whether the model thinks before it answers.", _thinking,
    _one_of(*_THINKING, budget_tokens=_BUDGET), absent=Thinking(),
)  # fmt: skip
_FORMAT = answer_format("format", "output_config.format")
_BETA_FORMAT = answer_format("output_format")
_EFFORT = effort("effort")
_OUTPUT = part("output_config", "The form of the answer.", Body(_FORMAT, _EFFORT))
_TOOLS: Field[list[dict[str, Any]]] = Field(
    "tools", "The functions that an answer may call.", _functions,
    {"type": "array", "items": {"type": "object"}}, absent=(),
)  # fmt: skip
_TOOL_CHOICE: Field[Mapping[str, Any]] = Field(
    "tool_choice", "Whether an answer calls a function, and which.", _choice,
    _one_of("auto", "any", "tool", "none", name={}, disable_parallel_tool_use={}), absent={},
)  # fmt: skip
_MARK: Field[bool] = Field(
    "cache_control",
    "What is computed of the request is kept longer; so it is with a mark on a block or a tool.",
    lambda _value, _name: True, {}, absent=False,
)  # fmt: skip
_OTHERS: tuple[Field[Any], ...] = (
    MODEL,
    STREAM,
    _SYSTEM,
    *sampling(stop="stop_sequences", max_temperature=1),
    _TOOLS,
    _TOOL_CHOICE,
    _THINKS,
    _OUTPUT,
    _BETA_FORMAT,
    *TEMPLATE,
    *refused("not supported by this server", "mcp_servers", "container"),
    *REFUSED,
    _MARK,
    *unaffected(),
)
MESSAGE = Body(_MESSAGES, needed(_MOST), *_OTHERS)
COUNTED = Body(_MESSAGES, _MOST, *_OTHERS)


def _request(values: Values) -> ParsedRequest:
    conversation, options = values[_MESSAGES], values.options
    messages = conversation.messages
    if (system := values[_SYSTEM]) is not None:
        messages.insert(0, {"role": "system", "content": system})
    options |= read_template(values, messages, prefills=True)
    config = values[_OUTPUT]
    if (wanted := config[_FORMAT] or values[_BETA_FORMAT]) is not None:
        options |= wanted.options
    tools = _tools(values)
    options |= conversation.options
    return ParsedRequest(
        model=values[MODEL],
        options=tools.options(options) if tools else options,
        stream=values[STREAM],
        report_stop_word="stop_words" in options and not tools,
        tools=tools,
        thinking=replace(values[_THINKS], effort=config[_EFFORT]),
        sent=wanted.sent if wanted else {},
        is_marked=values[_MARK] or _has_mark(map(values.given, (_SYSTEM, _TOOLS, _MESSAGES))),
        unknown=values.unknown,
    )


read_messages_request = reads(MESSAGE)(_request)
read_counted_request = reads(COUNTED)(_request)
"""The same for who only wants to know how many tokens it has."""


def _has_mark(given: Iterable[Any]) -> bool:
    """Return whether a block of a text, a message or a result has a mark, or a tool has one.

    What is in a tool's schema, or in what a model calls it with, is none.
    """
    left = list(given)
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            if each.get(_MARK.name) is not None:
                return True
            left.append(each.get("content"))
    return False


def _tools(values: Values) -> Tools | None:
    choice = values[_TOOL_CHOICE]
    kind = choice.get("type")
    named = choice.get("name") if kind == "tool" else None
    parallel = choice.get("disable_parallel_tool_use") is not True
    return Tools.checked(values[_TOOLS], _TOOL_CHOICES[kind], named, parallel=parallel)


def _messages(message: Any) -> list[Any]:
    """Return a message as chat messages; calls and their results are blocks of its content."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return [message]
    content = given = [_without_documents(block) for block in content]
    message = {**message, "content": given}

    def blocks(kind: str) -> list[dict[str, Any]]:
        return [block for block in given if isinstance(block, dict) and block.get("type") == kind]

    results, uses = blocks("tool_result"), blocks("tool_use")
    if message["role"] == "assistant":
        text = "".join(str(block.get("thinking", "")) for block in blocks("thinking"))
        content = _without(given, "thinking", "redacted_thinking")
        message = {**message, "content": content, "reasoning_content": text}
    if not results and not uses:
        return [message]
    tool_messages = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"),
         "content": block.get("content", "")} for block in results
    ]  # fmt: skip
    calls = [
        {"id": use.get("id"), "function": {"name": use.get("name"), "arguments": use.get("input")}}
        for use in uses
    ]
    rest = _without(content, "tool_result", "tool_use")
    if not calls:
        return [*tool_messages, *([{**message, "content": rest}] if rest else [])]
    return [*tool_messages, {**message, "content": rest or None, "tool_calls": calls}]


def _without_documents(block: Any) -> Any:
    """Return a block with the text of documents, which a chat template has no place for."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "tool_result" and isinstance(block.get("content"), list):
        return {**block, "content": [_without_documents(each) for each in block["content"]]}
    if kind != "document":
        return block
    source, cited = block.get("source"), block.get("citations")
    source = source if isinstance(source, dict) else {}
    form = source.get("type")
    if form not in ("text", "content") or (
        form == "text" and not isinstance(source.get("data"), str)
    ):
        what = "a document of type"
        raise bad_request(
            f"{what} {str(form)[:40]!r}: only text is supported, as source.type text or content",
            "messages", "unsupported_parameter",
        )  # fmt: skip
    if isinstance(cited, dict) and cited.get("enabled"):
        what = "citations: answers do not say which part of a document they are from"
        raise bad_request(what, "messages", "unsupported_parameter")
    text = source["data"] if form == "text" else read_text(source.get("content"), "messages")
    parts = [block.get("title"), block.get("context"), text]
    return {"type": "text", "text": "\n".join(str(part) for part in parts if part) + "\n\n"}


def _without(blocks: Sequence[Any], *kinds: str) -> list[Any]:
    return [b for b in blocks if not (isinstance(b, dict) and b.get("type") in kinds)]


class MessagesWriter:
    """Writes an answer as a message, or as Anthropic's events."""

    def __init__(self, request: ParsedRequest, record: RequestRecord) -> None:
        self.usage = Usage(1, 1)
        self._stop_words = request.options.get("stop_words", []) if request.report_stop_word else []
        self._stop: dict[str, str | None] = {"stop_reason": "end_turn", "stop_sequence": None}
        self._has_parts = request.has_parts
        self._block_count = 0
        self._block_type = ""
        self._message: dict[str, Any] = {
            "id": f"msg_{record.id}",
            "type": "message",
            "role": "assistant",
            "model": request.called,
            "content": [],
            **dict.fromkeys(self._stop),
        }

    def whole(self, answers: Sequence[Completion]) -> bytes:
        answer, calls = answers[0], answers[0].tool_calls
        uses = [{**_use(call), "input": json.loads(call.arguments)} for call in calls]
        self._count(answer)
        text = self._text(answer)
        thoughts = [_thought(answer.reasoning)] if answer.reasoning else []
        texts = [{"type": "text", "text": text}] if text or not (calls or thoughts) else []
        message = {
            **self._message,
            **self._stop,
            "content": [*thoughts, *texts, *uses],
            "usage": self._usage(),
        }
        return dump(message)

    def opening(self, piece: Piece) -> bytes:
        self.usage.update(0, piece.input_tokens, None, piece.extra.get(CACHED))
        start = _event("message_start", message={**self._message, "usage": self._usage()})
        # It may not be known yet whether the answer has any text, or what comes before.
        text = b"" if self._has_parts else self._start_block({"type": "text", "text": ""})
        return start + text + _event("ping")

    def chunk(self, piece: Piece) -> bytes:
        self._count(piece)
        text = self._text(piece)
        if not self._has_parts:
            return b"%b%b}}\n\n" % (_TEXT_EVENT, dump_text(text)) if text else b""
        events = []
        if piece.reasoning:
            if self._block_type != "thinking":
                events.append(self._start_block(_thought("")))
            delta = {"type": "thinking_delta", "thinking": piece.reasoning}
            events.append(self._block_event("delta", delta=delta))
        if text:
            if self._block_type != "text":
                events.append(self._start_block({"type": "text", "text": ""}))
            events.append(self._block_event("delta", delta={"type": "text_delta", "text": text}))
        for call in piece.tool_calls:
            if call.name:
                events.append(self._start_block({**_use(call), "input": {}}))
            if call.arguments:
                delta = {"type": "input_json_delta", "partial_json": call.arguments}
                events.append(self._block_event("delta", delta=delta))
        return b"".join(events)

    def _start_block(self, block: dict[str, Any]) -> bytes:
        """Start the next block, after ending the current one."""
        events = self._end_block()
        self._block_type = block["type"]
        self._block_count += 1
        return events + self._block_event("start", content_block=block)

    def _end_block(self) -> bytes:
        return self._block_event("stop") if self._block_type else b""

    def _block_event(self, kind: str, **content: Any) -> bytes:
        return _event(f"content_block_{kind}", index=self._block_count - 1, **content)

    def closing(self) -> bytes:
        return (
            self._end_block()
            + _event("message_delta", delta=self._stop, usage=self._usage())
            + _event("message_stop")
        )

    def _count(self, answer: Completion | Piece) -> None:
        cached = answer.extra.get(CACHED)
        self.usage.update(0, answer.input_tokens, answer.output_tokens, cached)

    def _usage(self) -> dict[str, int]:
        """Return the tokens as this API counts them: those of the cache are no other input."""
        given, cached = self.usage.input_tokens, self.usage.cached_tokens
        of_cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached or 0}
        return {
            "input_tokens": max(0, given - (cached or 0)),
            **({} if cached is None else of_cache),
            "output_tokens": self.usage.output_tokens,
        }

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _text(self, answer: Completion | Piece) -> str:
        """Return the text without the stop word at its end, and record why the answer ended."""
        if answer.finish_reason:
            self._stop["stop_reason"] = _REASONS.get(answer.finish_reason, "end_turn")
        text, word = without_stop_word(answer, self._stop_words)
        if word is not None:
            self._stop = {"stop_reason": "stop_sequence", "stop_sequence": word}
        return text


def _thought(text: str) -> dict[str, Any]:
    # Nobody but the model's own template reads it again, so nothing has to be signed.
    return {"type": "thinking", "thinking": text, "signature": ""}


def _use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def model_info(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this API says of a model, of what OpenAI's does."""
    created = datetime.fromtimestamp(report["created"], timezone.utc)
    return {
        "type": "model",
        "id": report["id"],
        "display_name": report["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": report["max_model_len"],
        "max_tokens": report["max_model_len"],
    }


def models_page(reports: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of the models that can be sent messages."""
    models = [model_info(report) for report in reports if report["task"] in (None, GENERATE)]
    limit = query.get("limit", str(_PAGE))
    if not (limit.isascii() and limit.isdecimal() and 1 <= len(limit) <= 4
            and 1 <= int(limit) <= _LARGEST_PAGE):  # fmt: skip
        raise bad_request(f"limit must be an integer from 1 to {_LARGEST_PAGE}", "limit")
    names = [model["id"] for model in models]
    start, end = 0, len(models)
    for name in ("after_id", "before_id"):
        if (cursor := query.get(name)) is None:
            continue
        if cursor not in names:
            raise bad_request(f"{name}: there is no model {cursor[:200]!r}", name)
        if name == "after_id":
            start = names.index(cursor) + 1
        else:
            end = names.index(cursor)
    # Before a model, those that are next to it.
    page = (
        models[start:end][-int(limit) :]
        if "before_id" in query
        else models[start:end][: int(limit)]
    )
    return {
        "data": page,
        "has_more": len(page) < end - start,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def error_body(error: ApiError) -> bytes:
    kind = _TYPES.get(error.status, error.type)
    message = _overflow(error) if isinstance(error, ContextError) else error.message
    return dump({"type": "error", "error": {"type": kind, "message": message}})


def _overflow(error: ContextError) -> str:
    """Return Anthropic's words for it, with which its clients shorten the conversation."""
    prompt, answer, context = error.prompt_tokens, error.max_tokens, error.context
    if prompt is None:
        return f"prompt is too long: over {context} tokens"
    if answer is None:
        return f"prompt is too long: {prompt} tokens > {context - 1} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {context}, "
        "decrease input length or `max_tokens` and try again"
    )


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dump({"type": kind, **content}))
