"""What the load generator's own wire reads and writes, byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.measure.wire import frames, hpack

HEADERS = [(":path", "/a/b"), ("te", "trailers"), ("x", "y" * 300), ("empty", "")]


def test_headers_are_read_as_they_were_written() -> None:
    assert hpack.decode(hpack.encode(HEADERS)) == dict(HEADERS)


def test_what_other_writers_use_is_passed_over() -> None:
    # An entry of the static table, a change of the table's size, a name of the static table
    # with a value to be remembered, a value in Huffman's code; and then a status.
    block = b"\x88" + b"\x20" + b"\x5f\x03abc" + b"\x00\x01k\x82\xff\xff"
    assert hpack.decode(block + hpack.encode([("grpc-status", "0")])) == {"grpc-status": "0"}
    with pytest.raises(hpack.UnreadableError):
        hpack.decode(b"\xbe")


def test_headers_are_read_right_however_many_there_were() -> None:
    reader = hpack.Reader()
    for number in [*range(200), *range(200)]:
        written = hpack.encode([("grpc-message", f"sorry {number}")])
        assert reader.read(written) == {"grpc-message": f"sorry {number}"}


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 30))
def test_frames_come_out_whole_however_they_arrive(payloads: list[bytes], step: int) -> None:
    data = b"".join(frames.pack(frames.DATA, 0, 2 * n + 1, p) for n, p in enumerate(payloads))
    splitter = frames.Splitter()
    found = [f for at in range(0, len(data), step) for f in splitter.feed(data[at : at + step])]
    assert found == [(frames.DATA, 0, 2 * n + 1, payload) for n, payload in enumerate(payloads)]


def test_padding_and_priority_are_taken_off() -> None:
    padded = frames.pack(frames.DATA, frames.PADDED, 1, b"\x02abc\0\0")
    urgent = frames.pack(frames.HEADERS, frames.PRIORITY, 3, b"\0\0\0\0\x01abc")
    found = frames.Splitter().feed(padded + urgent)
    assert [payload for *_, payload in found] == [b"abc", b"abc"]
