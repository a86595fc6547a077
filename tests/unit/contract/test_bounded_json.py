"""JSON from outside is counted before it is parsed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from llmserve.contract.bounded_json import MOST, BoundedJson, TooManyPartsError, parse_json

NESTED = "[" * 50 + "]" * 50
# Made only where they are tested: they are large.
BOMBS: dict[str, Callable[[], str]] = {
    "lists": lambda: '{"x": [' + ",".join([NESTED] * 40_000) + "]}",
    "keys": lambda: json.dumps({f"k{number}": 1 for number in range(330_000)}),
    "objects": lambda: json.dumps([{"role": "user", "content": "a"}] * 100_000),
    "behind quotes": lambda: '{"a": "\\\\\\"", "b": ["\\\\", ' + ",".join([NESTED] * 40_000) + "]}",
    "behind wide characters": lambda: '{"a": "\u2222", "b": [' + ",".join([NESTED] * 3_000) + "]}",
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32-be", "utf-8-sig"])
@pytest.mark.parametrize("name", BOMBS)
def test_a_text_that_is_much_in_memory_is_refused_before_it_is_parsed(
    name: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: Any) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(json, "loads", never)
    data = BOMBS[name]().encode(encoding)
    began = time.thread_time()
    with pytest.raises(TooManyPartsError):
        parse_json(data)
    # Parsed, the lists take 0.7 s and more on an idle machine.
    assert time.thread_time() - began < 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"prompt": "x = {'a': [1, 2], \"b\": {}}\\\n" * 50_000},
        lambda: {"prompt": [7] * 1_000_000},
        lambda: {"input": ["[{:,"] * 200_000},
        lambda: {"messages": [{"role": "user", "content": '\\"[' * 5}] * 10_000},
    ],
)
def test_a_text_of_many_words_or_numbers_is_parsed(make: Callable[[], Any]) -> None:
    value = make()
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value).encode("utf-16")) == value


def test_texts_that_come_together_share_the_bound() -> None:
    text = json.dumps([[]] * (MOST // 3))
    reader = BoundedJson()
    assert len(reader.parse(text)) == len(reader.parse(text)) == MOST // 3
    with pytest.raises(TooManyPartsError):
        reader.parse(json.dumps([[]] * (MOST // 2)))
    assert reader.parse('"[[[[["') == "[[[[["
