"""OpenAI's ``/v1/responses``; where responses are kept, requests may go on from them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmserve.client import Completion, Logprob, ModelInfo, Piece, ToolCall, Tools, ToolsError
from llmserve.runtime.contract import OPTIONS
from llmserve_gateway.conversations import (
    CONTENT,
    Conversation,
    list_of,
    message_schema,
    read_messages,
)
from llmserve_gateway.dialects import Later, Models
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import (
    STRING,
    Body,
    Field,
    Values,
    flag,
    ignored,
    length,
    mapping,
    option,
    part,
    reads,
    refused,
    said,
    text,
)
from llmserve_gateway.generation_fields import (
    CACHE_KEY,
    CONSTRAINTS,
    MODEL,
    PRIORITY,
    REFUSED,
    STREAM,
    TOOLS,
    answer_format,
    effort,
    read_constraint,
    read_tools,
    sampling,
    unaffected,
)
from llmserve_gateway.kept_items import Item, StoreError
from llmserve_gateway.keys import BatchKey, Key
from llmserve_gateway.openai_answers import (
    dump,
    dump_text,
    error_event,
    response_event,
    token_json,
)
from llmserve_gateway.reply import Reply, RequestRecord
from llmserve_gateway.stored_responses import (
    ResponseState,
    StoredResponse,
    new_id,
    owner_of,
)
from llmserve_gateway.text_dialect import ResponseWriter, TextDialect
from llmserve_gateway.text_requests import ParsedRequest, Thinking
from llmserve_gateway.usage import CACHED, Usage

log = logging.getLogger("llmserve.gateway")

_TRUNCATED = ("length", "cancelled")
_TEXT_EVENT = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
_LOGPROBS = "message.output_text.logprobs"
# What else can be included has no place in these answers, so nothing is left out of them.
_INCLUDABLE = (
    _LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip
_TOOL = 'use {"type": "function", "name": …, "parameters": …}'


def _item(kind: str, **fields: Any) -> dict[str, Any]:
    fields = {"type": {"const": kind}, **fields}
    return {"type": "object", "required": [*fields], "properties": fields}


ITEMS = list_of(
    message_schema(required=["content"], content=CONTENT),
    message_schema(
        required=[], roles=["assistant"], content={"anyOf": [CONTENT, {"type": "null"}]}
    ),
    _item("function_call", name=STRING, arguments={"type": ["string", "object"]}),
    _item("function_call_output", output=CONTENT),
    _item("reasoning"),
    _item("item_reference", id=STRING),
)


def _instructions(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{name} must be a string", name)
    return value


def _included(names: Any, name: str) -> list[str]:
    if not isinstance(names, list):
        raise bad_request(f"{name} must be a list", name)
    if unknown := [each for each in names if each not in _INCLUDABLE]:
        raise bad_request(f"{name}: {str(unknown[0])[:80]!r} is not supported", name)
    return names


@dataclass(frozen=True, eq=False)
class _Input:
    """The items of a request, and the conversation that they are but for references."""

    items: Sequence[Item]
    conversation: Conversation


_INPUT: Field[_Input] = Field(
    "input", "A text, or a conversation: all of it, or what is new.",
    lambda value, name: _read_input(value, name),
    {"anyOf": [{"type": "string", "minLength": 1}, ITEMS]}, required=True,
)  # fmt: skip
_INSTRUCTIONS: Field[str | None] = Field(
    "instructions", "What the system says before the conversation.", _instructions, STRING
)
_MAX_TOKENS = length("max_output_tokens", "The longest answer, in tokens.")
_TOP_LOGPROBS = option(OPTIONS["logprobs"], "top_logprobs", passed=False)
_FORMAT = answer_format("format", "text.format")
_TEXT = part("text", "The form of the answer.", Body(_FORMAT, *ignored("verbosity")))
_EFFORT = effort("effort")
_REASONING = part(
    "reasoning", "How the model thinks.", Body(_EFFORT, *ignored("summary", "generate_summary"))
)
_METADATA = mapping("metadata", "What the response repeats.")
_INCLUDE: Field[list[str]] = Field(
    "include", "What the response has besides.", _included,
    {"type": "array", "items": {"enum": [*_INCLUDABLE]}}, absent=(),
)  # fmt: skip

_STORE = said("store", "Whether the response is kept; so it is if not sent, where any are.")
_ID = {"type": "string", "minLength": 1}
_CONVERSATION: Field[str | None] = Field(
    "conversation", "The conversation that is gone on with, by its id or as an object with it.",
    lambda value, name: _conversation_id(value, name),
    {"anyOf": [_ID, {"type": "object", "required": ["id"], "properties": {"id": _ID}}]},
)  # fmt: skip
_BACKGROUND = flag(
    "background", "Whether the answer is not waited for: it is kept, and asked for by its id."
)
_PREVIOUS = text("previous_response_id", "The response that the conversation goes on from.")

RESPONSE = Body(
    _INPUT,
    MODEL,
    STREAM,
    _INSTRUCTIONS,
    _MAX_TOKENS,
    *sampling(),
    _TOP_LOGPROBS,
    _INCLUDE,
    *TOOLS,
    _REASONING,
    _TEXT,
    *CONSTRAINTS,
    _METADATA,
    _STORE,
    _PREVIOUS,
    _CONVERSATION,
    _BACKGROUND,
    *refused("this server stores no prompts: send instructions and input", "prompt"),
    *REFUSED,
    # Prompts are never cut, and a request that does not fit is refused.
    *ignored("truncation", "stream_options"),
    CACHE_KEY,
    PRIORITY,
    *unaffected("metadata", "store", CACHE_KEY.name),
)  # fmt: skip


@reads(RESPONSE)
def read_response_request(values: Values) -> ParsedRequest:
    given, options, instructions = values[_INPUT], values.options, values[_INSTRUCTIONS]
    conversation = given.conversation
    messages = _instructed(conversation.messages, instructions)
    text_format = values[_TEXT][_FORMAT]
    constraint, sent = read_constraint(values, text_format, _FORMAT.label)
    options |= constraint
    top_logprobs = values[_TOP_LOGPROBS]
    wants_logprobs = _LOGPROBS in values[_INCLUDE] or bool(top_logprobs)
    if wants_logprobs:
        options["logprobs"] = top_logprobs or 0
    if (most := values[_MAX_TOKENS]) is not None:
        options["max_tokens"] = most
    tools = _tools(values, messages)
    thinking = Thinking(effort=values[_REASONING][_EFFORT])
    if (background := values[_BACKGROUND]) and values[_STORE] is False:
        raise bad_request("background: what is answered later is kept: leave store out", "store")
    if conversation_id := values[_CONVERSATION]:
        if values[_PREVIOUS]:
            what = "send conversation or previous_response_id, not both"
            raise bad_request(what, "conversation")
        if values[_STORE] is False:
            what = "conversation: what is said in it is kept: leave store out"
            raise bad_request(what, "store")
    echoed = {
        "background": background,
        "instructions": instructions,
        "metadata": values[_METADATA] or {},
        "reasoning": {"effort": thinking.effort, "summary": None},
        "service_tier": "default",
        "text": {"format": (text_format and text_format.given) or {"type": "text"}},
        "top_logprobs": top_logprobs or 0,
        "truncation": "disabled",
    }
    if session := values[CACHE_KEY]:
        echoed[CACHE_KEY.name] = session
    options |= {**conversation.options, "messages": messages}
    return ParsedRequest(
        model=values[MODEL],
        options=tools.options(options) if tools else options,
        stream=values[STREAM],
        logprobs=wants_logprobs,
        tools=tools,
        thinking=thinking,
        echoed_fields=echoed,
        state=ResponseState(
            given.items,
            values[_PREVIOUS],
            instructions,
            values[_STORE],
            conversation=conversation_id,
            background=background,
        ),
        sent=sent,
        session=session,
        unknown=values.unknown,
        priority=values[PRIORITY],
    )


def _tools(values: Values, messages: Any) -> Tools | None:
    try:
        return read_tools(values, messages)
    except ToolsError as error:
        # The advice is about chats.
        raise ToolsError(error.problem, error.param, hint=error.hint and _TOOL) from None


def _instructed(messages: list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    return [*system, *messages]


def _read_input(value: Any, name: str) -> _Input:
    if isinstance(value, str) and value:
        items: list[Any] = [{"type": "message", "role": "user", "content": value}]
        return _Input(items, _conversation(items, name))
    items = value if isinstance(value, list) else []
    known = [item for item in items if not _is_reference(item)]
    for item in items:
        if _is_reference(item) and not isinstance(item.get("id"), str):
            raise bad_request(f"{name} has an item_reference without id", name)
    if items and not known:
        # All that it says is what others have said.
        return _Input(items, Conversation([{"role": "user", "content": ""}], []))
    return _Input(items, _conversation(known if items else value, name))


def read_items(value: Any, name: str) -> list[Item]:
    """Return items to keep, which are said as a whole and refer to no others."""
    if not isinstance(value, list) or not value:
        raise bad_request(f"{name} must be a list of items", name)
    if any(map(_is_reference, value)):
        raise bad_request(f"{name}: send items themselves, and no references", name)
    _conversation(value, name)
    return value


def _conversation_id(value: Any, name: str) -> str:
    id = value.get("id") if isinstance(value, dict) else value
    if not isinstance(id, str) or not id:
        raise bad_request(f'{name} must be an id or {{"id": …}}', name)
    return id


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference"


def _conversation(value: Any, name: str) -> Conversation:
    if isinstance(value, list):
        value = [_message(item, f"{name}[{index}]", name) for index, item in enumerate(value)]
    conversation = read_messages(value, name)
    return replace(conversation, messages=_with_joined_calls(conversation.messages))


def _message(item: Any, where: str, name: str) -> Any:
    """Return an item of a field as a chat message; calls and their results are separate items."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        return item
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list):
            raise bad_request(f"{where} has thoughts that are no list", name)
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        thoughts = "\n".join(text for text in texts if isinstance(text, str))
        return {"role": "assistant", "content": "", "reasoning_content": thoughts or None}
    if kind == "function_call":
        call = {"id": item.get("call_id"), "function": item}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = {"content": item.get("output"), "tool_call_id": item.get("call_id")}
        return {"role": "tool", **output}
    what = f"{where} is of type {str(kind)[:40]!r}: only messages and functions are supported"
    raise bad_request(what, name)


def _with_joined_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move calls into the assistant message before them, where chat templates expect them."""
    result: list[dict[str, Any]] = []
    # Put together at the end: there may be very many.
    thoughts: list[tuple[dict[str, Any], list[str]]] = []
    for message in messages:
        previous = result[-1] if result else {}
        if _is_thought(previous) and message["role"] == "assistant":
            if not thoughts or thoughts[-1][0] is not previous:
                thoughts.append((previous, [previous.get("reasoning_content") or ""]))
            thoughts[-1][1].append(message.get("reasoning_content") or "")
            previous.update(message)
        elif message.get("tool_calls") and previous.get("role") == "assistant":
            previous.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            result.append(message)
    for message, parts in thoughts:
        message["reasoning_content"] = "".join(parts)
    return result


def _is_thought(message: Mapping[str, Any]) -> bool:
    """Return whether a message is nothing but what the model thought before the next one."""
    return message.get("role") == "assistant" and message.get("content") == ""


@dataclass(frozen=True, eq=False, kw_only=True)
class ResponseDialect(TextDialect):
    """Responses, which may be kept."""

    async def settled(
        self, models: Models, key: Key | None, request: ParsedRequest
    ) -> ParsedRequest:
        """Return a request with all of its conversation, and whether its response is kept."""
        state, kept = request.state, models.responses
        if state is None:
            return request
        if kept is None:
            if state.background:
                what = "background: this server keeps no responses: wait, or send a batch"
                raise bad_request(what, "background")
            if name := state.refers_by:
                what = f"{name}: this server keeps no responses: send the conversation in input"
                raise bad_request(what, name)
            return request
        owner = owner_of(key)
        options = request.options
        if state.refers_by:
            items = await kept.resolved(owner, state.input)
            past = await kept.conversation(owner, state.previous) if state.previous else []
            if state.conversation:
                past = await kept.conversations.items(owner, state.conversation)
            conversation = _conversation([*past, *items], "input")
            messages = _instructed(conversation.messages, state.instructions)
            options = {**options, **conversation.options, "messages": messages}
            state = replace(state, input=items)
        if state.conversation and key and key.stateless:
            raise bad_request("conversation: this key keeps nothing", "conversation")
        if state.wanted is not False and not (key and key.stateless):
            state = replace(state, id=new_id(), owner=owner, created=int(time.time()))
        if state.background and (not state.id or isinstance(key, BatchKey)):
            what = "a batch is answered in the background" if state.id else "this key keeps nothing"
            raise bad_request(f"background: {what}", "background")
        return replace(request, options=options, state=state)

    def later(self, request: ParsedRequest, record: RequestRecord) -> Later | None:
        state = request.state
        if not (state and state.background):
            return None
        writer = ResponsesWriter(request, record)
        return Later(_stored(state, writer.queued), dump(writer.queued), writer.queued_events())

    async def begin(
        self,
        models: Models,
        info: ModelInfo,
        request: ParsedRequest,
        reply: Reply,
        timeout: float | None,
    ) -> tuple[Usage, Awaitable[None]]:
        if (state := request.state) and state.background:
            begun = {**ResponsesWriter(request, reply.record).queued, "status": "in_progress"}
            await self._write(models, _stored(state, begun))
        return await super().begin(models, info, request, reply, timeout)

    async def keep(self, models: Models, request: ParsedRequest, writer: ResponseWriter) -> None:
        state = request.state
        if not state or not state.id or not isinstance(writer, ResponsesWriter):
            return
        await self._write(models, _stored(state, writer.response()))

    async def _write(self, models: Models, stored: StoredResponse) -> None:
        assert models.responses is not None  # noqa: S101
        write = models.responses.update if stored.is_of_background else models.responses.add
        try:
            await write(stored)
        except StoreError as error:
            # Its client has the answer all the same, and the next request is told.
            log.error("the response %s could not be kept: %s", stored.id, error.problem)


def _stored(state: ResponseState, response: Mapping[str, Any]) -> StoredResponse:
    return StoredResponse(state.id, state.owner, state.input, response, state.previous)


class ResponsesWriter:
    """Writes an answer as a response object, or as OpenAI's events."""

    def __init__(self, request: ParsedRequest, record: RequestRecord) -> None:
        self.usage = Usage(1, 1)
        self._is_queued = bool(request.state and request.state.background)
        # The first two events have been sent before.
        self._sequence_number = 2 if self._is_queued else 0
        self._truncated = False
        state = request.state
        # What is kept has an id that nobody guesses, and no client has chosen.
        self._id = state.id.removeprefix("resp_") if state and state.id else record.id
        self._has_parts = request.has_parts
        self._output: list[dict[str, Any]] = []
        self._item_open = False
        self._texts: list[str] = []
        """The text of the message that is open."""
        self._text_position, self._text_at = b"", 0
        self._logprobs: list[dict[str, Any]] = []
        """Those of the message that is open."""
        self._new_logprobs: list[Logprob] = []
        """Those of tokens whose text has yet to come."""
        options = request.options
        functions = request.tools.functions if request.tools else ()
        conversation = state and state.conversation
        going_on = {"conversation": {"id": conversation}} if conversation else {}
        self._response: dict[str, Any] = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": (state and state.created) or int(time.time()),
            "status": "in_progress",
            "model": request.called,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "max_output_tokens": options.get("max_tokens"),
            "parallel_tool_calls": request.parallel_calls,
            "previous_response_id": state and state.previous,
            **going_on,
            "store": bool(state and state.id),
            "temperature": options.get("temperature", 0),
            "tool_choice": _tool_choice(request),
            "tools": [{"type": "function", **function} for function in functions],
            "top_p": options.get("top_p", 1),
            "usage": None,
            **request.echoed_fields,
        }

    def whole(self, answers: Sequence[Completion]) -> bytes:
        answer, calls = answers[0], answers[0].tool_calls
        self._update(answer)
        if answer.reasoning:
            self._output.append(self._thought(answer.reasoning))
        if answer.text or not (calls or answer.reasoning):
            logprobs = map(token_json, _within(answer.logprobs or (), answer.text))
            self._output.append(self._message(answer.text, [*logprobs]))
        self._output += map(self._call, calls)
        return dump(self.response())

    @property
    def queued(self) -> dict[str, Any]:
        """The response before anything is done for it."""
        return {**self._response, "status": "queued"}

    def queued_events(self) -> bytes:
        self._sequence_number = 0
        kinds = ("response.created", "response.queued")
        return b"".join(self._event(kind, response=self.queued) for kind in kinds)

    def opening(self, piece: Piece) -> bytes:
        del piece
        start = b""
        if not self._is_queued:
            start = self._event("response.created", response=self._response)
        start += self._event("response.in_progress", response=self._response)
        # It may not be known yet whether the answer has any text, or what comes before.
        return start if self._has_parts else start + self._start_item(self._message(""))

    def chunk(self, piece: Piece) -> bytes:
        self._update(piece)
        events = b""
        self._new_logprobs += piece.logprobs or ()
        if piece.reasoning or piece.tool_calls:
            self._new_logprobs = self._new_logprobs if piece.text else []
        if piece.reasoning:
            if not self._item_open or self._output[-1]["type"] != "reasoning":
                events += self._start_item(self._thought(""))
            self._texts.append(piece.reasoning)
            events += self._item_event("reasoning_text.delta", delta=piece.reasoning)
        if piece.text:
            if not self._item_open or self._output[-1]["type"] != "message":
                events += self._start_item(self._message(""))
            self._texts.append(piece.text)
            events += self._text_event(piece.text)
        for call in piece.tool_calls:
            if call.name:
                events += self._start_item({**self._call(call), "arguments": ""})
            if call.arguments:
                self._output[-1]["arguments"] += call.arguments
                events += self._item_event("function_call_arguments.delta", delta=call.arguments)
        return events

    def closing(self) -> bytes:
        events, response = self._end_item(), self.response()
        return events + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return error_event(error, number)

    def _start_item(self, item: dict[str, Any]) -> bytes:
        """Start the next item of the output, after ending the current one."""
        events = self._end_item()
        self._output.append(item)
        self._item_open = True
        self._texts, self._logprobs = [], []
        index, started = len(self._output) - 1, {**item, "status": "in_progress"}
        if "content" in item:
            started["content"] = []
        events += self._event("response.output_item.added", output_index=index, item=started)
        if "content" in item:
            events += self._item_event("content_part.added", part=item["content"][0])
        return events

    def _end_item(self) -> bytes:
        if not self._item_open:
            return b""
        self._item_open = False
        item = self._output[-1]
        item["status"] = self._status
        if "content" in item:
            (part,) = item["content"]
            part["text"] = "".join(self._texts)
            extra: dict[str, Any] = {}
            if item["type"] == "message":
                part["logprobs"] = extra["logprobs"] = self._logprobs
            events = self._item_event(f"{part['type']}.done", text=part["text"], **extra)
            events += self._item_event("content_part.done", part=part)
        else:
            content = {"arguments": item["arguments"], "name": item["name"]}
            events = self._item_event("function_call_arguments.done", **content)
        index = len(self._output) - 1
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _item_event(self, kind: str, **content: Any) -> bytes:
        """Return an event about the last item."""
        return self._event(f"response.{kind}", **self._position(), **content)

    def _text_event(self, text: str) -> bytes:
        """Return the event of new text; those of an item differ in their number and text alone."""
        if self._text_at != len(self._output):
            self._text_at = len(self._output)
            self._text_position = dump(self._position())[1:-1]
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        logprobs = [token_json(token) for token in self._new_logprobs]
        self._logprobs += logprobs
        self._new_logprobs = []
        return b'%b"sequence_number":%d,%b,"delta":%b,"logprobs":%b}\n\n' % (
            _TEXT_EVENT, number, self._text_position, dump_text(text), dump(logprobs)
        )  # fmt: skip

    def _position(self) -> dict[str, Any]:
        """Return which part of the output the last item is."""
        item = self._output[-1]
        position = {"item_id": item["id"], "output_index": len(self._output) - 1}
        return {**position, "content_index": 0} if "content" in item else position

    def _update(self, answer: Completion | Piece) -> None:
        cached = answer.extra.get(CACHED)
        thought = answer.reasoning_tokens
        self.usage.update(0, answer.input_tokens, answer.output_tokens, cached, thought)
        self._truncated = self._truncated or answer.finish_reason in _TRUNCATED

    @property
    def _status(self) -> str:
        return "incomplete" if self._truncated else "completed"

    def _new_item(self, kind: str, prefix: str) -> dict[str, Any]:
        # The position makes the ids of several items unique.
        suffix = f"_{len(self._output)}" if self._output else ""
        return {"id": f"{prefix}_{self._id}{suffix}", "type": kind, "status": self._status}

    def _message(self, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}
        return {**self._new_item("message", "msg"), "role": "assistant", "content": [part]}

    def _thought(self, text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {**self._new_item("reasoning", "rs"), "summary": [], "content": content}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        content = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        return {**self._new_item("function_call", "fc"), **content}

    def response(self) -> dict[str, Any]:
        """Return the response at its end."""
        input_tokens, output_tokens = self.usage.input_tokens, self.usage.output_tokens
        return {
            **self._response,
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._truncated else None,
            "output": self._output,
            "usage": {
                "input_tokens": input_tokens,
                "input_tokens_details": {
                    "cached_tokens": self.usage.cached_tokens or 0,
                    "cache_write_tokens": 0,
                },
                "output_tokens": output_tokens,
                "output_tokens_details": {"reasoning_tokens": self.usage.reasoning_tokens or 0},
                "total_tokens": input_tokens + output_tokens,
            },
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return response_event(kind, number, **content)


def _tool_choice(request: ParsedRequest) -> Any:
    if not request.tools:
        return "none"
    named = request.tools.named
    return {"type": "function", "name": named} if named else request.tools.choice


def _within(logprobs: Sequence[Logprob], text: str) -> list[Logprob]:
    """Return those of the tokens that the message consists of, not of thinking and calls."""
    start = "".join(entry.token for entry in logprobs).rfind(text)
    if start < 0:
        return [*logprobs]
    found, at = [], 0
    for entry in logprobs:
        if start < at + len(entry.token) and at < start + len(text):
            found.append(entry)
        at += len(entry.token)
    return found
