"""Forms with files, in pieces of any size."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from llmserve_gateway.batches.multipart import Form, Part
from llmserve_gateway.errors import ApiError

BOUNDARY = "b-1"
TYPE = f'multipart/form-data; boundary="{BOUNDARY}"'
# What is likely to be mistaken for the end of a part.
CONTENT = st.lists(
    st.sampled_from([b"\r", b"\n", b"\r\n", b"-", b"--", b"--b-", b"b-1", b"x", b""])
)


def encoded(parts: list[tuple[str, bytes]]) -> bytes:
    body = b""
    for name, content in parts:
        head = f'Content-Disposition: form-data; name="{name}"; filename="a b.txt"'
        body += f"--{BOUNDARY}\r\n{head}\r\nContent-Type: text/plain\r\n\r\n".encode()
        body += content + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


def read(pieces: list[bytes]) -> list[tuple[Part, bytes]]:
    form = Form(TYPE)
    found: list[tuple[Part, bytes]] = []
    for piece in pieces:
        for item in form.feed(piece):
            if isinstance(item, Part):
                found.append((item, b""))
            else:
                part, content = found[-1]
                found[-1] = part, content + item
    form.end()
    return found


@settings(deadline=None)
@given(data=st.data())
def test_a_form_is_the_same_in_whatever_pieces_it_comes(data: st.DataObject) -> None:
    one = st.tuples(st.sampled_from(["file", "purpose"]), CONTENT.map(b"".join))
    parts = data.draw(st.lists(one, min_size=1, max_size=4))
    parts = [(name, content) for name, content in parts if b"\r\n--b-1" not in b"\r\n" + content]
    body = data.draw(st.sampled_from([b"", b"\r\n"])) + encoded(parts) + b"epilogue"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    expected = [(Part(name, "a b.txt"), content) for name, content in parts]
    assert read(pieces) == expected
    assert read([bytes([byte]) for byte in body]) == expected


@settings(deadline=None)
@given(st.lists(CONTENT.map(b"".join), max_size=6))
def test_what_is_no_form_is_refused_and_breaks_nothing(pieces: list[bytes]) -> None:
    pieces = [*pieces, b"--b-1"]
    assume(b"--b-1--" not in b"".join(pieces))
    with pytest.raises(ApiError):
        read(pieces)


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "application/json",
        "multipart/form-data",
        f"x; boundary={'b' * 71}",
        f"multipart/form-data; boundary=b; x={'y' * 1024}",
    ],
)
def test_a_body_without_a_boundary_is_refused(kind: str) -> None:
    with pytest.raises(ApiError, match="must be a form"):
        Form(kind)


@pytest.mark.parametrize("kind", ["boundary*=x; boundary*0=y", f"boundary*{'1' * 5000}*=x"])
def test_parameters_that_mean_nothing_are_refused(kind: str) -> None:
    with pytest.raises(ApiError) as refusal:
        Form(f"multipart/form-data; {kind}")
    assert refusal.value.status == 400


PARAMETERS = st.lists(
    st.sampled_from(
        ["name", "filename", "*", "0", "1", "=", ";", "; ", '"', "\\", "'", "''", "%", "%C3", "x",
         "undefined", "idna", "utf-8", "9" * 5000]
    ),
    max_size=14,
)  # fmt: skip


@settings(deadline=None)
@given(PARAMETERS.map("".join))
@example("name*=x; name*0=y")
@example(f"name*{'9' * 5000}*=x")
@example("filename*=undefined''x")
@example("filename*=idna''%C3")
def test_the_head_of_a_part_is_read_or_refused(parameters: str) -> None:
    head = f"content-disposition: form-data; {parameters}"
    with suppress(ApiError):
        read([f"--b-1\r\n{head}\r\n\r\nx\r\n--b-1--".encode()])


def test_what_a_client_can_make_long_is_bounded() -> None:
    head = b'--b-1\r\ncontent-disposition: form-data; name="'
    with pytest.raises(ApiError, match="over 8 KB"):
        read([head, *[b"x" * 1024] * 9])
    with pytest.raises(ApiError, match="over 8 KB"):
        read([b"--b-1", b" " * 9000])
    with pytest.raises(ApiError, match="more than 32 parts"):
        read([encoded([("f", b"")] * 33)])


@pytest.mark.parametrize("after", [b"z", b"-a", b"\ra"])
def test_content_with_very_many_beginnings_of_a_boundary_is_refused(after: bytes) -> None:
    """Each takes as long to read as thousands of other bytes do, and all requests wait for that."""
    piece = (b"\r\n--b-1" + after) * 40
    head, end = b"--b-1\r\ncontent-disposition: form-data; name=f\r\n\r\n", b"\r\n--b-1--\r\n"
    assert read([head, piece, end]) == [(Part("f", None), piece)]
    with pytest.raises(ApiError, match="more than 64 boundaries"):
        read([head, piece, piece, end])


def test_a_form_that_is_wrong_prints_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Anybody with a key could fill a log."""
    with pytest.raises(ApiError, match="cannot be read"):
        read([b"--b-2\r\n"])
    assert not caplog.records


def test_of_two_headers_of_a_part_the_last_one_counts() -> None:
    head = "content-disposition: form-data; name=a\r\ncontent-disposition: form-data; name=b"
    assert read([f"--b-1\r\n{head}\r\n\r\nx\r\n--b-1--".encode()]) == [(Part("b", None), b"x")]


def test_fields_and_the_names_of_files_are_told_apart() -> None:
    def parts(head: str) -> Any:
        body = f"--b-1\r\n{head}\r\n\r\nx\r\n--b-1--".encode()
        return read([body])[0][0]

    assert parts('content-disposition: form-data; name="a"') == Part("a", None)
    assert parts('Content-Disposition: form-data; name=a; filename=""') == Part("a", "")
    assert parts("x: y") == Part("", None)
    named = "content-disposition: form-data; name=\"a\"; filename*=utf-8''%C3%A9.jsonl"
    assert parts(named) == Part("a", "é.jsonl")
