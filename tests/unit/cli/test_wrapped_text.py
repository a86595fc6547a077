"""Lines that end between words, whatever the pieces are that the text arrives in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmserve_cli.wrapped_text import WordWrap

TEXTS = st.lists(st.sampled_from(["a", "word", "longer", "x" * 45, "日本", " ", "  ", "\n"]))


def wrapped(pieces: list[str], columns: int) -> str:
    lines: list[str] = []
    wrap = WordWrap(lines.append, lambda: columns)
    for piece in pieces:
        wrap.write(piece)
    wrap.end()
    return "".join(lines)


@given(TEXTS, st.integers(2, 40))
def test_no_word_is_lost_or_broken_and_no_line_too_long(pieces: list[str], columns: int) -> None:
    text = "".join(pieces)
    result = wrapped(pieces, columns)
    assert result.split() == text.split()
    for line in result.split("\n"):
        is_broken_by_the_terminal = any(len(word) > columns for word in line.split())
        assert len(line) <= columns or is_broken_by_the_terminal or line.startswith(" ")


@given(TEXTS, st.integers(1, 40))
def test_the_pieces_make_no_difference(pieces: list[str], columns: int) -> None:
    text = "".join(pieces)
    if all(len(word) < 30 for word in text.split()):
        assert wrapped(pieces, columns) == wrapped(list(text), columns)


def test_a_text_that_fits_is_left_as_it_is() -> None:
    code = "def f(x):\n    return x\n\n\n- one\n"
    assert wrapped([code], 80) == code
    assert wrapped(["one two three"], 7) == "one two\nthree"


def test_a_long_run_without_spaces_is_not_held_back() -> None:
    lines: list[str] = []
    WordWrap(lines.append, lambda: 80).write("日" * 40)
    assert lines == ["日" * 40]
