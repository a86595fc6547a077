"""Reading of requests without a server: accepted and refused fields, errors and admission."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseErrorEvent

from llmserve.client import Completion, Logprob, Piece, ToolsError
from llmserve.contract.failures import Failure, write
from llmserve.errors import (
    ClientError,
    LLMServeError,
    ModelNotReadyError,
    RequestRejectedError,
    RequestTimeoutError,
    UnreachableError,
)
from llmserve.testing.client import client_error
from llmserve_gateway.admission import Admission, Limits
from llmserve_gateway.anthropic import MessagesWriter, error_body, read_messages_request
from llmserve_gateway.bodies import read_json
from llmserve_gateway.conversations import read_messages
from llmserve_gateway.errors import ApiError, from_llmserve
from llmserve_gateway.openai_answers import ChatWriter, CompletionWriter
from llmserve_gateway.openai_requests import read_chat, read_completion
from llmserve_gateway.reply import RequestRecord
from llmserve_gateway.responses import ResponsesWriter, read_response_request
from llmserve_gateway.text_requests import ParsedRequest
from llmserve_gateway.turns import Party

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "m", "prompt": "Hi"}


def test_options_have_the_names_of_the_tensor_contract() -> None:
    request = read_chat({**CHAT, "max_completion_tokens": 5, "stop": "x", "top_k": -1, "seed": 1,
                       "chat_template_kwargs": {"a": 1}, "logit_bias": {"5": 2},
                       "bad_words": ["y"]})  # fmt: skip
    assert request.options == {
        "max_tokens": 5,
        "stop_words": ["x"],
        "seed": 1,
        "chat_template_kwargs": {"a": 1},
        "logit_bias": {"5": 2},
        "bad_words": ["y"],
        "messages": [{"role": "user", "content": "Hi"}],
    }


def test_what_a_response_cannot_have_is_refused_in_its_own_shape() -> None:
    asked = {"model": "m", "input": "Hi"}
    for field, value in (("prompt", {"id": "p"}), ("include", ["poem"]), ("include", "x")):
        with pytest.raises(ApiError, match=field) as caught:
            read_response_request({**asked, field: value})
        assert caught.value.param == field
    with pytest.raises(ToolsError, match="tools") as tool:
        read_response_request({**asked, "tools": [{"type": "web_search"}]})
    assert '"function": {' not in str(tool.value)
    assert '"name"' in str(tool.value)
    # Agents send it with every request.
    read_response_request({**asked, "include": ["reasoning.encrypted_content"]})


def test_the_logprobs_of_a_message_are_of_its_own_tokens() -> None:
    asked = {"model": "m", "input": "Hi", "include": ["message.output_text.logprobs"]}
    tokens = [Logprob(i, token, -0.5) for i, token in enumerate(("<t>", "hm", "</t>", "Yes", "!"))]
    writer = ResponsesWriter(read_response_request(asked), RequestRecord("x"))
    whole = writer.whole([Completion("Yes!", "stop", logprobs=(*tokens,), reasoning="hm")])
    (part,) = json.loads(whole)["output"][1]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["Yes", "!"]
    writer = ResponsesWriter(read_response_request(asked), RequestRecord("x"))
    events = writer.chunk(Piece("", logprobs=(*tokens[:3],), reasoning="hm"))
    events += writer.chunk(Piece("", logprobs=(tokens[3],)))
    events += writer.chunk(Piece("Yes!", logprobs=(tokens[4],))) + writer.closing()
    lines = [line for line in events.decode().splitlines() if line.startswith("data: ")]
    final = json.loads(lines[-1].removeprefix("data: "))["response"]
    (part,) = final["output"][1]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["Yes", "!"]


def test_what_user_interfaces_send_for_no_value_is_none() -> None:
    for read, body, length in (
        (read_chat, CHAT, "max_tokens"),
        (read_chat, CHAT, "max_completion_tokens"),
        (read_completion, TEXT, "max_tokens"),
        (read_response_request, {"model": "m", "input": "Hi"}, "max_output_tokens"),
    ):
        options = read({**body, "seed": -1, length: -1}).options
        assert not {"seed", "max_tokens"} & options.keys()
        with pytest.raises(ApiError, match="or -1 for no limit"):
            read({**body, length: -2})
        with pytest.raises(ApiError, match="or -1 for no limit"):
            read({**body, length: True})
    # OpenAI's seeds may be negative, those of models may not.
    seeds = {read_chat({**CHAT, "seed": seed}).options["seed"] for seed in (-2, -3, 5, -(2**63))}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_an_answer_may_have_as_many_stop_words_as_a_model_takes() -> None:
    words = [f"stop {i}" for i in range(64)]
    for read, body in ((read_chat, CHAT), (read_completion, TEXT)):
        assert read({**body, "stop": words}).options["stop_words"] == words
        with pytest.raises(ApiError, match="at most 64"):
            read({**body, "stop": [*words, "x"]})


def test_a_last_message_may_be_continued() -> None:
    begun = {"model": "m", "messages": [*CHAT["messages"], {"role": "assistant", "content": "A"}]}
    request = read_chat({**begun, "continue_final_message": True, "add_generation_prompt": False})
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    assert request.options["chat_template_kwargs"] == ends
    assert read_chat({**begun, "continue_final_message": True}).options == request.options
    request = read_chat({**CHAT, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}})
    given = {"a": 1, "add_generation_prompt": False}
    assert request.options["chat_template_kwargs"] == given
    assert "chat_template_kwargs" not in read_chat({**CHAT, "add_generation_prompt": True}).options
    for body in (
        {**CHAT, "continue_final_message": True},
        {**begun, "continue_final_message": True, "add_generation_prompt": True},
        {**begun, "continue_final_message": 1},
        {**begun, "add_generation_prompt": 0},
    ):
        with pytest.raises(ApiError) as caught:
            read_chat(body)
        assert caught.value.param in ("continue_final_message", "add_generation_prompt")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [2]),
        ("allowed_token_ids", [2]),
        ("chat_template", "{{ messages }}"),
        ("documents", [{"text": "x"}]),
        ("use_beam_search", True),
        ("truncate_prompt_tokens", 5),
        ("prompt_logprobs", 0),
        ("return_token_ids", True),
    ],
)
def test_what_changes_an_answer_and_cannot_be_had_is_refused(name: str, value: Any) -> None:
    for read, body in (
        (read_chat, CHAT),
        (read_completion, TEXT),
        (read_response_request, {"model": "m", "input": "Hi"}),
    ):
        with pytest.raises(ApiError, match=name) as caught:
            read({**body, name: value})
        assert (caught.value.status, caught.value.param) == (400, name)
        nothings: list[Any] = [None, False, []]
        for nothing in nothings:
            assert not read({**body, name: nothing}).unknown


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_chat, CHAT),
        (read_completion, TEXT),
        (read_response_request, {"model": "m", "input": "Hi"}),
    ],
)
def test_a_cache_key_names_a_session(read: Callable[[Any], Any], body: dict[str, Any]) -> None:
    request = read({**body, "prompt_cache_key": "chat 5"})
    assert (request.session, request.unknown) == ("chat 5", frozenset())
    assert request.model_calls() == read(body).model_calls()
    assert [read({**body, "prompt_cache_key": none}).session for none in (None, "")] == ["", ""]
    assert read(body).session == ""
    assert read({**body, "prompt_cache_key": "k" * 512}).session
    for wrong in ("k" * 513, 5, ["k"], "\ud800"):
        with pytest.raises(ApiError) as caught:
            read({**body, "prompt_cache_key": wrong})
        assert (caught.value.status, caught.value.param) == (400, "prompt_cache_key")


def test_anthropics_cache_marks_change_nothing_of_a_prompt_and_are_noted() -> None:
    def body(**mark: Any) -> dict[str, Any]:
        text = {"type": "text", "text": "Hi", **mark}
        schema = {"type": "object", "properties": {}}
        use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}, **mark}
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": [text], **mark}
        source = {"type": "text", "media_type": "text/plain", "data": "All of it."}
        return {
            "model": "m", "max_tokens": 1, "system": [text], **mark,
            "tools": [{"name": "look", "input_schema": schema, **mark}],
            "messages": [
                {"role": "user", "content": [text, {"type": "document", "source": source, **mark}]},
                {"role": "assistant", "content": [text, use]},
                {"role": "user", "content": [result, text]},
            ],
        }  # fmt: skip

    plain = read_messages_request(body())
    for mark in ({"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}):
        marked = read_messages_request(body(cache_control=mark))
        assert (marked.options, marked.tools) == (plain.options, plain.tools)
        assert not marked.unknown
        assert (marked.is_marked, plain.is_marked) == (True, False)


_MARK = {"cache_control": {"type": "ephemeral"}}
_TEXT_BLOCK = {"type": "text", "text": "Hi"}
_MARKED = {**_TEXT_BLOCK, **_MARK}
_SCHEMA = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
_USE = {"type": "tool_use", "id": "call_1", "name": "look", "input": {**_MARK}}


@pytest.mark.parametrize(
    ("more", "is_marked"),
    [
        (_MARK, True),
        ({"cache_control": None}, False),
        ({"system": [_MARKED]}, True),
        ({"system": [{**_TEXT_BLOCK, "cache_control": None}]}, False),
        ({"tools": [{"name": "look", "input_schema": _SCHEMA, **_MARK}]}, True),
        ({"messages": [{"role": "user", "content": [_TEXT_BLOCK, _MARKED]}]}, True),
        (
            {
                "tools": [{"name": "look", "input_schema": _SCHEMA}],
                "messages": [
                    {"role": "user", "content": "cache_control"},
                    {"role": "assistant", "content": [_USE]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "call_1", "content": "cache_control"}
                    ]},
                ],
            },
            False,
        ),
    ],
)  # fmt: skip
def test_a_cache_mark_is_one_of_a_block_a_tool_or_the_request(
    more: dict[str, Any], is_marked: bool
) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    assert read_messages_request({**body, **more}).is_marked == is_marked


def test_each_answer_is_a_separate_model_call() -> None:
    request = read_completion({"model": "m", "prompt": [[1, 2], [3]], "n": 2, "seed": 9})
    assert request.model_calls() == [
        ("", {"seed": 9, "input_ids": [1, 2]}),
        ("", {"seed": 10, "input_ids": [1, 2]}),
        ("", {"seed": 9, "input_ids": [3]}),
        ("", {"seed": 10, "input_ids": [3]}),
    ]


@pytest.mark.parametrize(
    ("constraint", "options"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "a"}}}},
            {"json_schema": '{"type": "a"}'},
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "a"}}},
            {"json_schema": '{"type": "a"}'},
        ),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ],
)
def test_output_constraints(constraint: Any, options: Any) -> None:
    assert read_completion({**TEXT, **constraint}).options == options


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": 5}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "response_format"),
        ({"structured_outputs": {"poem": 1}}, "structured_outputs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"suffix": 5}, "suffix"),
        ({"suffix": "x", "prompt": [1, 2]}, "suffix"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"model": "\ud800"}, "model"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "include_usage"),
        ({"repetition_penalty": 10**400}, "repetition_penalty"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ],
)
def test_invalid_fields_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_completion({**TEXT, **body})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_the_first_of_several_unknown_parts_of_a_constraint_is_named() -> None:
    """Not another one each time that the gateway is started."""
    sent = {"regex": "a", "zero": None, **dict.fromkeys("tenmornames", 1)}
    with pytest.raises(ApiError) as caught:
        read_completion({**TEXT, "structured_outputs": sent})
    assert caught.value.message == "'t' is not supported"


def test_a_choice_may_be_a_list_as_its_error_says() -> None:
    with pytest.raises(ApiError) as caught:
        read_completion({**TEXT, "guided_choice": 5})
    assert caught.value.message == "guided_choice must be a text, or a list of texts"


def test_a_response_echoes_its_request() -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    named = {"type": "function", "name": "f"}
    body = {"model": "m", "input": "Hi"}
    echoed = {"instructions": "Be short", "metadata": {"for": "a test"}, "tool_choice": named}
    request = read_response_request({**body, **echoed, "tools": [function]})
    response = json.loads(ResponsesWriter(request, RequestRecord("x")).whole([Completion("")]))
    assert {name: response[name] for name in echoed} == echoed
    assert response["text"] == {"format": {"type": "text"}}
    text = {"format": {"type": "json_schema", "name": "f", "schema": {"type": "object"}}}
    request = read_response_request({**body, "text": text})
    assert (
        json.loads(ResponsesWriter(request, RequestRecord("x")).whole([Completion("")]))["text"]
        == text
    )
    with pytest.raises(ApiError) as caught:
        read_response_request({**body, "text": {"format": {"type": "poem"}}})
    assert caught.value.param == "text.format"


def test_an_error_in_a_response_continues_the_event_sequence() -> None:
    writer = ResponsesWriter(
        read_response_request({"model": "m", "input": "Hi"}), RequestRecord("x")
    )
    lines = (
        (writer.opening(Piece("")) + writer.failure(ApiError(503, "gone"))).decode().splitlines()
    )
    events = [json.loads(line[6:]) for line in lines if line[:6] == "data: "]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert ResponseErrorEvent.model_validate(events[-1]).message == "gone"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "1"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)
NAMES = st.sampled_from(
    ["model", "messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "stop",
     "stream", "stream_options", "n", "seed", "logprobs", "echo", "logit_bias", "tools", "input",
     "response_format", "tool_choice", "text", "instructions", "system", "stop_sequences",
     "thinking", "structured_outputs", "guided_json", "suffix", "output_config", "output_format"]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([CHAT, TEXT, {"model": "m", "input": "Hi"}]), st.dictionaries(NAMES, VALUES))
def test_any_body_is_read_or_refused(body: dict[str, Any], changes: dict[str, Any]) -> None:
    for read in READERS:
        refusal = None
        try:
            request = read({**body, **changes})
        except ApiError as error:
            refusal = error
        except ToolsError as error:
            refusal = from_llmserve(error)
        if refusal:
            assert refusal.status == 400
            assert json.loads(refusal.json())
        else:
            assert 1 <= len(request.model_calls()) <= 128
            assert request.estimated_tokens >= 1


READERS = (read_chat, read_completion, read_messages_request, read_response_request)


@pytest.mark.parametrize("example", [CHAT, {**TEXT, "stop": ["a"], "seed": 1}])
def test_corrupt_bodies_are_the_clients_fault(example: dict[str, Any]) -> None:
    """A body with changed, lost or added bytes is still a request, or is refused with 400."""
    rng, statuses = random.Random(0), list[int]()
    for _ in range(500):
        body = bytearray(json.dumps(example).encode())
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(body))
            body[start : start + rng.randint(0, 3)] = rng.choices(b'{}[]",:0\\u\xff\x00', k=2)

        async def receive(body: bytes = bytes(body)) -> Any:
            return {"type": "http.request", "body": body}

        try:
            content = asyncio.run(read_json(receive, {}))
        except ApiError as error:
            statuses.append(error.status)
            continue
        for read in READERS:
            try:
                read(content)
            except ApiError as error:
                statuses.append(error.status)
    assert len(statuses) > 300
    assert {*statuses} == {400}


@pytest.mark.parametrize("length", ["9" * 5000, "4194305"])
def test_a_body_that_says_that_it_is_too_large_is_refused(length: str) -> None:
    async def receive() -> Any:
        raise AssertionError("such a client waits, and sends nothing")

    headers = {"content-length": length, "expect": "100-continue"}
    with pytest.raises(ApiError) as refusal:
        asyncio.run(read_json(receive, headers))
    assert refusal.value.status == 413


def refused(code: str, param: str | None = None, **details: int) -> ClientError:
    """Return what the client raises for a refusal of llmserve's runtime."""
    words = "words that quote 'the queue of 'm' is full' and [llmserve model_died] "
    return client_error(write(Failure(code, words, param, details)))


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (ModelNotReadyError("no"), 404, "model", "model_not_found"),
        (RequestTimeoutError("late"), 504, None, "timeout"),
        (UnreachableError("gone"), 503, None, "backend_unavailable"),
        (refused("model_died"), 503, None, "model_died"),
        (refused("model_failed"), 500, None, "model_failed"),
        (refused("no_memory"), 413, None, "no_memory"),
        (refused("queue_full"), 429, None, "queue_full"),
        (refused("constraint_queue_full"), 429, None, "queue_full"),
        (refused("timeout_in_queue"), 504, None, "timeout"),
        (refused("unsupported_option", "stop_words"), 400, "stop", "unsupported_parameter"),
        (refused("unknown_option", "max_token"), 400, "max_token", "unknown_parameter"),
        (refused("invalid_value", "top_k"), 400, "top_k", "invalid_value"),
        (refused("invalid_value", "json_schema"), 400, "response_format", "invalid_value"),
        (refused("empty_prompt", "text_input"), 400, "prompt", "empty_prompt"),
        (refused("no_chat_template", "messages"), 400, "messages", "no_chat_template"),
        (refused("context_length_exceeded", "max_tokens", context=5, prompt_tokens=1, max_tokens=9),
         400, "max_tokens", "context_length_exceeded"),
        (RequestRejectedError("words of another's model"), 400, None, "unknown"),
        (ClientError("the server sent a truncated text"), 500, None, "bad_answer"),
    ],
)  # fmt: skip
def test_failures_in_openais_format(
    error: LLMServeError, status: int, param: str | None, code: str | None
) -> None:
    api_error = from_llmserve(error)
    assert (api_error.status, api_error.param, api_error.code) == (status, param, code)


def test_a_client_without_a_command_line_is_told_nothing_of_its_options() -> None:
    nowhere = "failed to connect to all addresses; last error: UNKNOWN: Connection refused"
    error = from_llmserve(client_error(nowhere, "UNAVAILABLE"))
    assert error.message == "no Triton answers at 127.0.0.1:8001: try again in a moment"
    assert int(error.headers["retry-after"]) > 0


def test_a_client_waits_for_a_model_that_has_died() -> None:
    error = from_llmserve(refused("model_died"))
    assert int(error.headers["retry-after"]) > 0
    assert json.loads(error_body(error))["error"]["type"] == "overloaded_error"


FIELDS: list[tuple[Any, dict[str, Any], str]] = [
    (read_chat, {**CHAT, "guided_regex": "a"}, "guided_regex"),
    (read_completion, {**TEXT, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    (read_chat, {**CHAT, "guided_json": {}}, "guided_json"),
    (read_chat, {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
    (read_response_request, {"model": "m", "input": "Hi", "text": {"format": {
        "type": "json_schema", "schema": {}}}}, "text.format"),
    (read_messages_request, {**CHAT, "max_tokens": 1, "output_config": {"format": {
        "type": "json_schema", "schema": {}}}}, "output_config.format"),
    (read_messages_request, {**CHAT, "max_tokens": 1, "output_format": {
        "type": "json_schema", "schema": {}}}, "output_format"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "body", "field"), FIELDS)
def test_a_refusal_names_the_field_that_was_sent(read: Any, body: Any, field: str) -> None:
    request = read(body)
    (option,) = {"regex", "json_schema", "json_object"} & request.options.keys()
    for code in ("unsupported_option", "invalid_value"):
        error = from_llmserve(refused(code, option), request.sent)
        assert error.param == field
        assert code == "invalid_value" or field in error.message
    assert from_llmserve(refused("invalid_value", option)).param in ("regex", "response_format")


# What clients look for: litellm 1.110 (its is_error_str_context_window_exceeded), langchain-openai
# 1.7 (with openai 3.5x, whose errors no longer print the code), pydantic-ai 2.68, Claude Code.
LITELLM = ("this model's maximum context length is", "prompt is too long", "exceed context limit")
OVERFLOWS = [
    {"context": 512, "prompt_tokens": 600},
    {"context": 512, "prompt_tokens": 233, "max_tokens": 300},
    {"context": 512},
    {"context": 512, "prompt_tokens": 600, "max_tokens": 20},
]


@pytest.mark.parametrize("numbers", OVERFLOWS)
def test_clients_recognise_an_overflow(numbers: dict[str, int]) -> None:
    error = from_llmserve(refused("context_length_exceeded", None, **numbers))
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.message.startswith("This model's maximum context length is 512 tokens")
    assert "prompt is too long" in error.message
    theirs = json.loads(error_body(error))["error"]
    assert theirs["type"] == "invalid_request_error"
    assert any(words in theirs["message"] for words in LITELLM)
    if numbers.get("prompt_tokens") == 233:
        assert (
            "you requested 533 tokens (233 in the prompt, 300 in the completion)" in error.message
        )
        assert "279" in error.message
        wanted = "input length and `max_tokens` exceed context limit: 233 + 300 > 512"
        assert theirs["message"].startswith(wanted)
    elif numbers.get("prompt_tokens") == 600:
        assert theirs["message"] == "prompt is too long: 600 tokens > 511 maximum"


def test_many_blocks_of_thinking_are_read_in_linear_time() -> None:
    blocks = [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": ""}] * 20_000
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": blocks}]
    began = time.process_time()
    read_messages_request({"model": "m", "max_tokens": 1, "messages": messages})
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("item", "most"),
    [
        ({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}, 40_000),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 80}]}, 25_000),
    ],
)
def test_many_items_of_one_turn_are_joined_in_linear_time(item: Any, most: int) -> None:
    began = time.process_time()
    request = read_response_request({"model": "m", "input": [item] * most})
    assert time.process_time() - began < 2.5
    (turn,) = request.options["messages"]
    thought = len(turn.get("reasoning_content", "")) // 80
    assert len(turn.get("tool_calls", ())) + thought == most


def test_thoughts_join_what_comes_after_them() -> None:
    thoughts = [{"type": "reasoning", "summary": [{"text": text}]} for text in ("a", "b")]
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "c"}
    items = [*thoughts, call, call, *thoughts, said, call, said]
    turns = read_response_request({"model": "m", "input": items}).options["messages"]
    seen = [
        (turn.get("reasoning_content"), turn["content"], len(turn.get("tool_calls", ())))
        for turn in turns
    ]
    assert seen == [("ab", None, 2), ("ab", "c", 1), (None, "c", 0)]


@pytest.mark.parametrize(
    "field",
    [
        {"chat_template_kwargs": {"a": "x" * 200_000}},
        {"messages": [{"role": "user", "content": "x" * 200_000}]},
        {"structured_outputs": {"grammar": "x" * 200_000}},
    ],
)
def test_what_several_answers_multiply_is_limited(field: dict[str, Any]) -> None:
    assert read_chat({**CHAT, **deepcopy(field), "n": 50}).answer_count == 50
    with pytest.raises(ApiError) as caught:
        read_chat({**CHAT, **field, "n": 100})
    error = caught.value
    assert (error.status, error.code, error.param) == (413, "request_too_large", "n")


def test_ids_for_several_answers_are_limited() -> None:
    body = {"model": "m", "prompt": [1] * 100_000}
    assert read_completion({**body, "n": 50}).answer_count == 50
    with pytest.raises(ApiError, match="over 16 MB"):
        read_completion({**body, "n": 100})


def test_what_several_prompts_multiply_is_limited() -> None:
    body = {"model": "m", "structured_outputs": {"grammar": "x" * 200_000}}
    assert read_completion({**deepcopy(body), "prompt": ["a"] * 50}).answer_count == 50
    with pytest.raises(ApiError) as caught:
        read_completion({**body, "prompt": ["a"] * 100})
    assert (caught.value.status, caught.value.param) == (413, "prompt")


@pytest.mark.parametrize("depth", [70, 200])
def test_arguments_of_calls_are_nested_no_deeper_than_requests(depth: int) -> None:
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ApiError, match="64 levels deep"):
        read_chat({**CHAT, "messages": [{"role": "assistant", "tool_calls": [call]}]})


def test_anthropics_fields_are_done_or_refused_by_name() -> None:
    body = {**CHAT, "max_tokens": 1}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = read_messages_request(
        {**body, "output_config": {"effort": "low", "format": {
            "type": "json_schema", "schema": schema}}}
    )  # fmt: skip
    assert json.loads(request.options["json_schema"]) == schema
    for kind in ("adaptive", "disabled", "enabled"):
        assert not read_messages_request({**body, "thinking": {"type": kind}}).unknown
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (read_messages_request, {**body, "thinking": {"type": "perhaps"}}, "thinking"),
        (read_messages_request, {**body, "thinking": {"type": "enabled", "budget_tokens": 0}},
         "thinking"),
        (read_chat, {**CHAT, "reasoning_effort": "as much as you like"}, "reasoning_effort"),
        (read_messages_request, {**body, "output_config": {"format": {"type": "xml"}}},
         "output_config.format"),
        (read_chat, {**CHAT, "web_search_options": {"user_location": {}}}, "web_search_options"),
        (read_chat, {**CHAT, "web_search_options": {}}, "web_search_options"),
    ]  # fmt: skip
    for read, content, param in refused:
        with pytest.raises(ApiError) as caught:
            read(content)
        assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("text", ['say "\n\t"', "\x00\x1f\u2028", "naïve 😀", "\\", "</script>"])
def test_any_text_survives_in_a_chunk(text: str) -> None:
    request = ParsedRequest("m", {}, include_usage=True)
    piece = Piece(text, finish_reason="stop", input_tokens=1, output_tokens=2)
    for writer in (
        ChatWriter(request, RequestRecord("x")),
        CompletionWriter(request, RequestRecord("x")),
    ):
        chunk = writer.chunk(piece)
        assert chunk.endswith(b"}\n\n")
        (choice,) = json.loads(chunk.removeprefix(b"data: "))["choices"]
        assert choice.get("text", choice.get("delta", {}).get("content")) == text
    for other in (
        MessagesWriter(request, RequestRecord("x")),
        ResponsesWriter(request, RequestRecord("x")),
    ):
        delta = json.loads(other.chunk(piece).split(b"data: ")[-1])["delta"]
        assert (delta if isinstance(delta, str) else delta["text"]) == text


def test_a_streamed_echo_alone_has_no_output_tokens() -> None:
    request = read_completion({**TEXT, "echo": True, "max_tokens": 0, "stream": True,
                             "stream_options": {"include_usage": True}})  # fmt: skip
    writer = CompletionWriter(request, RequestRecord("x"))
    writer.chunk(Piece("!", finish_reason="length", input_tokens=2, output_tokens=1))
    assert (writer.usage.input_tokens, writer.usage.output_tokens) == (2, 0)


@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets_are_exact_even_for_held_back_or_cut_text(echo: bool) -> None:
    request = read_completion({**TEXT, "echo": echo, "logprobs": 0})
    first, *others = [Logprob(id, token, -1.0) for id, token in enumerate((" a", "bc", "d."))]
    start = len("Hi") if echo else 0
    expected = [start, start + 2, start + 4]
    whole = CompletionWriter(request, RequestRecord("x")).whole(
        [Completion(" ab", "stop", 1, 3, logprobs=(first, *others))]
    )
    assert json.loads(whole)["choices"][0]["logprobs"]["text_offset"] == expected
    writer = CompletionWriter(request, RequestRecord("x"))
    pieces = [
        Piece("", logprobs=(first,)),
        Piece(" a", logprobs=tuple(others)),
        Piece("b", finish_reason="stop"),
    ]
    chunks = [json.loads(writer.chunk(piece).removeprefix(b"data: ")) for piece in pieces]
    logprobs = [chunk["choices"][0]["logprobs"] or {"text_offset": []} for chunk in chunks]
    assert [offset for entry in logprobs for offset in entry["text_offset"]] == expected


def test_slots_are_taken_in_the_step_that_checks() -> None:
    async def fill() -> tuple[list[ApiError], int]:
        admission = Admission(Limits(max_requests=1, max_queue=2, max_queued_tokens=100))
        release = asyncio.Event()
        refused: list[ApiError] = []

        async def ask(tokens: int) -> None:
            try:
                with admission.hold("m", tokens):
                    async with admission.admit():
                        await release.wait()
            except ApiError as error:
                refused.append(error)

        tasks = [asyncio.ensure_future(ask(30)) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(ask(90)))  # The queue has space, but not for 90 tokens.
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return refused, admission.running + admission.waiting + len(admission.tokens)

    refused, left = asyncio.run(fill())
    assert [error.status for error in refused] == [429, 429, 429]
    assert {*refused[0].headers} == {"retry-after", "retry-after-ms"}
    assert left == 0


def test_a_full_queue_says_when_it_will_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(seconds: float) -> ApiError:
        loop, now = asyncio.get_running_loop(), 0.0
        monkeypatch.setattr(loop, "time", lambda: now)
        admission = Admission(Limits(max_requests=2, max_queue=0))
        async with admission.admit():
            now = seconds
        async with admission.admit(2):
            with pytest.raises(ApiError) as caught:
                async with admission.admit():
                    pass
        monkeypatch.undo()
        return caught.value

    for seconds, after in ((0.0, "1"), (0.5, "1"), (30.0, "15"), (900.0, "60")):
        error = asyncio.run(refused(seconds))
        assert error.headers == {"retry-after": after, "retry-after-ms": f"{after}000"}
        assert ("a second" if after == "1" else f"{after} seconds") in error.message


def test_a_full_queue_of_tokens_says_when_it_will_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused(seconds: float, tokens: int) -> ApiError:
        loop, now = asyncio.get_running_loop(), 0.0
        monkeypatch.setattr(loop, "time", lambda: now)
        admission = Admission(Limits(max_queued_tokens=100))
        async with admission.admit():
            now = seconds
        with (
            admission.hold("m", 80),
            pytest.raises(ApiError) as caught,
            admission.hold("m", tokens),
        ):
            pass
        monkeypatch.undo()
        return caught.value

    for seconds, tokens, after in ((0.5, 60, 1), (40.0, 60, 20), (40.0, 500, 40), (900.0, 60, 60)):
        error = asyncio.run(refused(seconds, tokens))
        assert error.headers["retry-after"] == str(after)
        assert ("a second" if after == 1 else f"{after} seconds") in error.message


def test_the_wait_for_a_slot_is_limited_by_the_requests_timeout() -> None:
    async def wait() -> tuple[ApiError, int]:
        admission = Admission(Limits(max_requests=1))
        async with admission.admit():
            with pytest.raises(ApiError) as caught:
                async with admission.admit(seconds=0.01):
                    pass
        async with admission.admit(seconds=60):
            return caught.value, admission.running + admission.waiting

    error, slots = asyncio.run(wait())
    assert (error.status, error.code, slots) == (504, "timeout", 1)


def test_several_answers_take_several_slots() -> None:
    async def run() -> list[str]:
        admission = Admission(Limits(max_requests=4, max_queue=4))
        started: list[str] = []
        ends = {name: asyncio.Event() for name in ("three", "two", "one", "many")}

        async def ask(name: str, answers: int) -> None:
            async with admission.admit(answers):
                started.append(name)
                await ends[name].wait()

        tasks = [
            asyncio.ensure_future(ask(*call)) for call in (("three", 3), ("two", 2), ("one", 1))
        ]
        await asyncio.sleep(0)
        assert (started, admission.waiting) == (["three"], 3), "no request overtakes another"
        with pytest.raises(ApiError, match="3 wait"):
            await ask("many", 2)
        tasks[1].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert started == ["three", "one"], "a request gets the slots of a cancelled one before it"
        for end in ends.values():
            end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await ask("many", 128)
        assert (admission.running, admission.waiting) == (0, 0)
        return started

    assert asyncio.run(run()) == ["three", "one", "many"]


ALICE, BOB = Party("key", "alice"), Party("key", "bob")
A, B = Party("model", "a"), Party("model", "b")


def test_one_of_several_keys_or_models_leaves_half_to_the_others() -> None:
    async def run() -> list[str]:
        admission = Admission(Limits(max_requests=8, max_queue=4))
        started: list[str] = []
        ends: dict[str, asyncio.Event] = {}
        tasks = []

        async def ask(name: str, answers: int, *parties: Party) -> None:
            ends[name] = asyncio.Event()
            async with admission.admit(answers, parties=parties):
                started.append(name)
                await ends[name].wait()

        async def begin(name: str, answers: int, *parties: Party) -> None:
            tasks.append(asyncio.ensure_future(ask(name, answers, *parties)))
            await asyncio.sleep(0)

        await begin("alice's 128", 128, ALICE, A)
        await begin("alice waits", 2, ALICE, A)
        with pytest.raises(ApiError, match="4 requests of this key are running and 2 wait"):
            await ask("alice again", 1, ALICE, B)
        await begin("bob", 2, BOB, A)
        assert started == ["alice's 128", "bob"], "whose share is taken is overtaken by others"
        await begin("bob, who waits for the model", 1, BOB, A)
        await begin("bob's other", 1, BOB, B)
        assert (started[2:], admission.running, admission.waiting) == (["bob's other"], 7, 3)
        ends["alice's 128"].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert started[3:] == ["alice waits", "bob, who waits for the model"]
        for end in ends.values():
            end.set()
        await asyncio.gather(*tasks)
        assert (admission.running, admission.waiting) == (0, 0)
        return started

    assert len(asyncio.run(run())) == 5


def test_one_of_several_keys_holds_half_of_what_may_be_held() -> None:
    admission = Admission(Limits(max_queued_tokens=100))
    with admission.hold("a", 40, ALICE):
        with pytest.raises(ApiError, match="of this key that count as 40"):
            admission.hold("a", 20, ALICE).__enter__()
        with admission.hold("b", 40, ALICE), admission.hold("a", 50, BOB):
            assert admission.tokens == {"a": 90, "b": 40}
    assert not admission.tokens


@pytest.mark.parametrize(
    "body",
    [
        b'{"unknown": [' + b",".join([b"[" * 50 + b"]" * 50] * 40_000) + b"]}",
        json.dumps({f"k{number}": 1 for number in range(250_000)}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "a"}] * 80_000}).encode(),
    ],
)
def test_a_body_that_is_much_in_memory_is_refused_before_it_is_parsed(body: bytes) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    began = time.process_time()
    with pytest.raises(ApiError, match="more than 100000 lists, objects and keys") as caught:
        asyncio.run(read_json(receive, {}))
    assert caught.value.status == 400
    # Parsed, the first takes 0.7 s on an idle machine, and then the depth is looked at.
    assert time.process_time() - began < 0.5


def test_the_arguments_of_all_calls_together_are_bounded() -> None:
    arguments = json.dumps({"a": [[]] * 40_000})
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert len(read_messages([message] * 2).messages) == 2
    with pytest.raises(ApiError, match="more than 100000 lists, objects and keys"):
        read_messages([message] * 3)


@pytest.mark.parametrize("thoughts", [5, True, "hm", {"text": "hm"}])
@pytest.mark.parametrize("name", ["content", "summary"])
def test_thoughts_are_a_list(name: str, thoughts: Any) -> None:
    item = {"type": "reasoning", name: thoughts}
    with pytest.raises(ApiError, match="no list"):
        read_response_request({"model": "m", "input": [item]})
