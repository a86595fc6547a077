"""The chunks of streams, of which the constant parts are written only once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.client import Piece
from llmserve_gateway.endpoints import CHAT, COMPLETION, MESSAGE, RESPONSE
from llmserve_gateway.openai_answers import dump
from llmserve_gateway.reply import RequestRecord
from llmserve_gateway.text_dialect import TextDialect

_HELLO = [{"role": "user", "content": "Hello"}]
_BODIES: dict[str, tuple[TextDialect, Mapping[str, Any]]] = {
    "chat": (CHAT, {"messages": _HELLO}),
    "chat with usage": (CHAT, {"messages": _HELLO, "stream_options": {"include_usage": True}}),
    "completion": (COMPLETION, {"prompt": "Hello"}),
    "response": (RESPONSE, {"input": "Hello"}),
    "message": (MESSAGE, {"messages": _HELLO, "max_tokens": 9}),
}
_TEXT: dict[str, Callable[[Any], str]] = {
    "chat": lambda event: event["choices"][0]["delta"].get("content", ""),
    "chat with usage": lambda event: event["choices"][0]["delta"].get("content", ""),
    "completion": lambda event: event["choices"][0]["text"],
    "response": lambda event: event["delta"],
    "message": lambda event: event["delta"]["text"],
}
texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=5)


def events(stream: bytes) -> list[tuple[str, bytes]]:
    """Return the name and the data of each event, where a name comes first if there is one."""
    found = []
    for block in stream.split(b"\n\n")[:-1]:
        *name, data = block.split(b"\n")
        assert data.startswith(b"data: ")
        found.append((name[0].decode() if name else "", data.removeprefix(b"data: ")))
    return found


@pytest.mark.parametrize("kind", _BODIES)
@given(texts)
def test_a_chunk_is_what_one_that_is_written_whole_would_be(kind: str, pieces: list[str]) -> None:
    dialect, body = _BODIES[kind]
    writer = dialect.new_writer(
        dialect.read({"model": "m", "stream": True, **body}), RequestRecord("id")
    )
    number = len(events(writer.opening(Piece(""))))
    for text in pieces:
        ((name, data),) = events(writer.chunk(Piece(text, output_tokens=1)))
        event = json.loads(data)
        assert data == dump(event)
        assert _TEXT[kind](event) == text
        assert name == (f"event: {event['type']}" if "type" in event else "")
        assert event.get("sequence_number", number) == number
        number += 1
    closing = b"".join(data for _, data in events(writer.closing()))
    if kind == "response":
        # The events at its end contain the text as a whole.
        whole = dump("".join(pieces))
        assert closing.count(b'"text":' + whole) == 4
