"""What is read of an answer, however its bytes are divided, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.client import http_answer
from llmserve.client.http_answer import AnswerReader, BodyReader, BrokenAnswerError, LineReader

OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    "a length": OK + b"content-length: 5\r\n\r\nhello",
    "chunks": OK
    + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nx: y\r\n\r\n",
    "until the end": OK + b"x: y\r\n\r\nhello",
    "an old one": b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    "an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 5\r\n\r\nhello",
}


def read(data: bytes, cuts: list[int]) -> tuple[AnswerReader, bytes]:
    reader, body = AnswerReader(), b""
    edges = [0, *sorted({cut % len(data) for cut in cuts}), len(data)]
    for first, last in pairwise(edges):
        if first < last:
            body += reader.feed(data[first:last])
    if not reader.is_complete:
        reader.end()
    return reader, body


@pytest.mark.parametrize("kind", ANSWERS)
@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 1 << 16), max_size=80))
def test_an_answer_is_the_same_however_it_arrives(kind: str, cuts: list[int]) -> None:
    reader, body = read(ANSWERS[kind], cuts)
    assert (reader.status, body, reader.is_complete) == (200, b"hello", True)
    assert reader.keeps_connection == (kind not in ("until the end", "an old one"))


@pytest.mark.parametrize("kind", [kind for kind in ANSWERS if kind != "until the end"])
def test_an_answer_that_is_cut_off_is_no_answer(kind: str) -> None:
    for size in range(1, len(ANSWERS[kind])):
        reader = AnswerReader()
        reader.feed(ANSWERS[kind][:size])
        assert not reader.is_complete
        with pytest.raises(BrokenAnswerError):
            reader.end()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b"a b: c\r\n\r\n",
        OK + b"content-length: -1\r\n\r\n",
        OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        OK + b"content-length: 99999999999999999999\r\n\r\n",
        OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\n-1\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 9000,
        OK + b"transfer-encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    reader = AnswerReader()
    with pytest.raises(BrokenAnswerError):
        reader.feed(data)


@pytest.mark.parametrize(
    "data",
    [
        OK + b"a: b\r\n" * 20000,
        OK + b"a: " + b"b" * 70000,
        OK + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 20000,
        OK + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 70000,
    ],
)
def test_what_is_no_body_has_a_limit(data: bytes) -> None:
    with pytest.raises(BrokenAnswerError, match="over 64 KB that are no body"):
        read(data, [*range(0, len(data), 1000)])


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), start=st.sampled_from([b"", OK, OK + b"content-length: "]))
def test_any_bytes_are_an_answer_or_broken(data: bytes, start: bytes) -> None:
    reader = AnswerReader()
    try:
        reader.feed(start + data)
        reader.end()
    except BrokenAnswerError:
        return
    assert 200 <= reader.status < 600


def test_an_answer_that_nobody_asked_for_ends_its_connection() -> None:
    reader = AnswerReader()
    reader.feed(ANSWERS["a length"] + b"HTTP/1.1 200 OK")
    assert reader.is_complete
    assert not reader.keeps_connection


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"a", b"\n")), max_size=20))
def test_lines_are_the_same_however_they_arrive(pieces: list[bytes]) -> None:
    reader = LineReader()
    lines = [line for piece in pieces for line in reader.feed(piece)]
    lines += reader.end()
    assert b"\n".join(lines) == b"".join(pieces).removesuffix(b"\n")


def test_a_line_and_a_body_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_answer, "MOST_LINE", 10)
    monkeypatch.setattr(http_answer, "MOST_BODY", 10)
    lines, body = LineReader(), BodyReader()
    assert lines.feed(b"123456789\n123456789") == [b"123456789"]
    with pytest.raises(BrokenAnswerError, match="a line of over"):
        lines.feed(b"12")
    body.feed(b"123456789")
    with pytest.raises(BrokenAnswerError, match="the answer is over"):
        body.feed(b"12")
