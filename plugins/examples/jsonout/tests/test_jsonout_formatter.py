"""What becomes a call, what stays text, and that the document is always one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmserve.runtime import Answer
from llmserve_jsonout.calls import Call, find_calls, parse
from llmserve_jsonout.formatter import JsonFormatter, document

TIME = '{"name": "time", "arguments": {"zone": "KST"}}'
TAGGED = f"<tool_call>\n{TIME}\n</tool_call>"
CALL = Call("time", {"zone": "KST"})


def answer(text: str, *, piece: str | None = None, finished: bool = True) -> Answer:
    reason = "stop" if finished else None
    return Answer(text if piece is None else piece, "", reason, 3, 5, False, so_far=text)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        (f"I look.\n{TAGGED}", "I look.", [CALL]),
        (f"{TAGGED}\n{TAGGED}", "", [CALL, CALL]),
        ('{"name": "time", "parameters": {"zone": "KST"}}', "", [CALL]),
        (f"[{TIME}, {TIME}]", "", [CALL, CALL]),
        # What is nearly a call is text, and all of it.
        ("<tool_call>{oops</tool_call>", "<tool_call>{oops</tool_call>", []),
        (f"<tool_call>{TIME}", f"<tool_call>{TIME}", []),
        ('{"name": "time", "arguments": "KST"}', '{"name": "time", "arguments": "KST"}', []),
        ('{"name": 3, "arguments": {}}', '{"name": 3, "arguments": {}}', []),
        (f"[{TIME}, 3]", f"[{TIME}, 3]", []),
        ("[]", "[]", []),
    ],
)
def test_what_is_a_call(text: str, content: str, calls: list[Call]) -> None:
    assert find_calls(text) == (content, calls)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "1e999", "{", "", "[" * 100_000])
def test_what_is_no_json_is_no_value(text: str) -> None:
    assert parse(text) is None


def test_an_answer_that_is_json_is_told_as_its_value() -> None:
    told = json.loads(document(answer('{"city": "Seoul"}')))
    assert (told["value"], told["content"]) == ({"city": "Seoul"}, '{"city": "Seoul"}')
    assert told["usage"] == {"input_tokens": 3, "output_tokens": 5}


@given(st.text())
@example('{"a": "\\ud800"}')
@example('{"name": "x", "arguments": {"b": 1e400}}')
def test_the_document_is_json_whatever_was_written(text: str) -> None:
    told = json.loads(document(answer(text)), parse_constant=pytest.fail)
    assert told["content"] == text or told["tool_calls"]


def test_a_stream_gets_its_document_at_the_end_and_of_the_whole() -> None:
    formatter = JsonFormatter({}, Path())
    begun = answer(TAGGED[:20], finished=False)
    done = answer(TAGGED, piece=TAGGED[20:])
    first, last = (formatter.format([one])["json_output"][0] for one in (begun, done))
    assert first == b""
    told: dict[str, Any] = json.loads(last)
    assert told["tool_calls"] == [{"name": "time", "arguments": {"zone": "KST"}}]
    assert told["finish_reason"] == "stop"
