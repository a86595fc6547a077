"""Pieces join to the whole text and never contain stop words, wherever the boundaries are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.runtime.answer.text import IncrementalDecoder, StopScanner


def decode(ids: Sequence[int]) -> str:
    """Decode bytes as a byte-level tokenizer does."""
    return bytes(ids).decode("utf-8", errors="replace")


def spaced(ids: Sequence[int]) -> str:
    """Decode words as a SentencePiece tokenizer does: the first one loses its space."""
    return " ".join(f"w{i}" for i in ids)


def pieces(decoder: IncrementalDecoder, ids: Sequence[int]) -> list[str]:
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@given(st.text(), st.text())
def test_pieces_join_to_the_text_after_any_prompt(prompt: str, text: str) -> None:
    decoder = IncrementalDecoder(decode, prompt.encode())
    assert "".join(pieces(decoder, text.encode())) == text


@given(st.binary(max_size=60), st.binary(max_size=6))
def test_pieces_of_any_bytes_join_to_what_decoding_all_gives(data: bytes, prompt: bytes) -> None:
    context = b"prompt " + prompt + b" "
    decoder = IncrementalDecoder(decode, context)
    whole = decode(context + data)[len(decode(context)) :]
    assert "".join(pieces(decoder, data)) == whole


@given(st.binary(max_size=60), st.lists(st.integers(1, 9)))
def test_tokens_pushed_several_at_once_give_the_same_text(data: bytes, widths: list[int]) -> None:
    alone, together, text, start = IncrementalDecoder(decode), IncrementalDecoder(decode), "", 0
    for width in [*widths, len(data)]:
        text += together.push(*data[start : start + width])
        start += width
    assert text + together.flush() == "".join(pieces(alone, data))


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9)))
def test_the_space_between_prompt_and_answer_is_kept(prompt: list[int], ids: list[int]) -> None:
    decoder = IncrementalDecoder(spaced, prompt)
    assert "".join(pieces(decoder, ids)) == spaced([*prompt, *ids])[len(spaced(prompt)) :]


@given(st.text(min_size=1))
def test_no_piece_holds_half_a_character(text: str) -> None:
    decoded = "".join(pieces(IncrementalDecoder(decode), text.encode()))
    assert "\ufffd" not in decoded or "\ufffd" in text


def test_endless_garbage_is_not_held_back_forever() -> None:
    decoder = IncrementalDecoder(decode)
    text = "".join(decoder.push(0xFF) for _ in range(100))
    assert len(text) > 50


@given(
    st.text(alphabet="abc", max_size=40),
    st.text(alphabet="abc", min_size=1, max_size=4),
    st.lists(st.integers(1, 5)),
)
def test_a_stop_word_is_detected_across_pieces(text: str, word: str, widths: list[int]) -> None:
    scanner, output, start = StopScanner([word]), "", 0
    for width in [*widths, len(text)]:
        output += scanner.push(text[start : start + width])
        start += width
    assert output + scanner.flush() == text.partition(word)[0]
    assert scanner.hit == (word in text)


def test_the_earliest_of_several_stop_words_counts() -> None:
    scanner = StopScanner(["later", "now"])
    assert scanner.push("here and now and later") == "here and "
    keeping = StopScanner(["later", "now"], keep=True)
    assert (keeping.push("here and n"), keeping.push("ow and later")) == ("here and ", "now")


@pytest.mark.parametrize("words", [[], [""]])
def test_without_stop_words_nothing_is_held_back(words: list[str]) -> None:
    scanner = StopScanner(words)
    assert (scanner.push("any"), scanner.flush(), scanner.hit) == ("any", "", False)
