"""The grammar against Python's own reader of JSON."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from llmserve_jsonout.grammar import BEGIN, State

VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)
NEARLY = st.text(st.sampled_from('{}[]":,.-+0123eEtrufalsn\\/b \n\t\x01ä'), max_size=14)


def completed(state: State) -> str:
    """Complete a document in the shortest way."""
    text = ""
    while not state.is_complete:
        nexts = ((c, state.feed(c)) for c in '"}]:0\\nrulase')
        steps = [(c, after) for c, after in nexts if after and after.shortest < state.shortest]
        character, state = steps[0]
        text += character
    return text


@given(OBJECTS, st.sampled_from([None, 2]), st.booleans())
def test_every_object_is_one_however_it_is_written(
    value: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    state = BEGIN.feed(text)
    assert state is not None
    assert state.is_complete
    assert state.shortest == 0


@given(OBJECTS, st.data())
def test_every_beginning_can_be_completed_in_as_many_characters_as_it_says(
    value: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(value)
    begun = text[: data.draw(st.integers(0, len(text)))]
    state = BEGIN.feed(begun)
    assert state is not None
    rest = completed(state) if begun else "{}"
    assert len(rest) == state.shortest
    assert isinstance(json.loads(begun + rest), dict)


@given(NEARLY.map(lambda text: "{" + text))
@example('{"a":01}')
@example('{"a":1.}')
@example('{"a":-}')
@example('{"a":1,}')
@example('{"a" "b"}')
@example('{"a":[1}')
@example('{"\\u12g4":1}')
@example('{"a":1}]')
@example('{"a":1} ')
def test_what_python_does_not_read_is_no_document_and_the_other_way_round(text: str) -> None:
    state = BEGIN.feed(text)
    try:
        json.loads(text)
    except ValueError:
        assert state is None or not state.is_complete
    else:
        assert state is not None
        assert state.is_complete


def test_a_document_is_an_object() -> None:
    assert [BEGIN.feed(text) for text in ("[", "1", '"', "n")] == [None] * 4
