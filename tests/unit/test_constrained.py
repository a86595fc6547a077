"""Answers held to a form, chosen at random: whatever the model likes, the form is kept."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

import llmserve.demo
from llmserve.runtime import Generation, RequestError, Sampler, TransformersTokenizer
from llmserve.runtime.params import read_params
from llmserve.runtime.text_formatter import TextFormatter

FOLDER = Path(llmserve.demo.__file__).parent / "model"
TOKENIZER = TransformersTokenizer({"path": "."}, FOLDER)
FORMATTER = TextFormatter({}, FOLDER)
# More scores than the tokenizer has tokens, as models with a padded vocabulary have.
VOCABULARY = 1024 + 64
ENDS = np.array([token in TOKENIZER.eos_ids or bool({*TOKENIZER.decode([token])} & {*'"]}'})
                 for token in range(VOCABULARY)])  # fmt: skip
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
"""What the public JSON Schema test material asks of a validator, and what people ask of models."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
}
GRAMMAR = 'start: "yes" | "no" " " /[0-9]{1,3}/'
EBNF = 'root ::= "yes" | "no " [0-9]'


def begun(values: Mapping[str, Any], seed: int, max_tokens: int) -> tuple[Generation, Sampler]:
    """Return a generation that is held to a form, and what chooses its tokens."""
    generation = Generation(
        TOKENIZER.encode("Tell me"),
        read_params({"temperature": 1.0, "seed": seed, **values}),
        max_tokens=max_tokens,
        eos_ids=TOKENIZER.eos_ids,
        decode=TOKENIZER.decode,
    )
    generation.constraint = FORMATTER.constrain(generation, TOKENIZER)
    return generation, Sampler(generation, TOKENIZER)


def held(
    values: Mapping[str, Any], *, seed: int = 0, max_tokens: int = 200, hurry: float = 0
) -> Generation:
    """Return a generation that random scores have filled; in a hurry, they come to like ends."""
    generation, sampler = begun(values, seed, max_tokens)
    liked = np.random.default_rng(seed)
    while not generation.done:
        wish = liked.normal(scale=3, size=VOCABULARY)
        generation.push(sampler.choose(wish + ENDS * (hurry * len(generation.token_ids))))
    return generation


def kept(schema: Any, seed: int) -> str | None:
    """Answer at random and look at the answer; tell why it ended, None if it was refused."""
    try:
        answer = held({"json_schema": json.dumps(schema)}, seed=seed, max_tokens=160, hurry=0.1)
    except RequestError as refused:
        return None if "\n" not in str(refused) else str(refused)
    if answer.finish_reason == "stop":
        kind = validator_for(schema, default=Draft202012Validator)
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(answer.text))
    else:
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == 160
    return answer.finish_reason


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("values", "fits"),
    [
        pytest.param(
            {"choice": ["red", "green (light)", "a|b", "naïve 🦙"]},
            lambda text: text in ("red", "green (light)", "a|b", "naïve 🦙"),
            id="choice",
        ),
        pytest.param({"regex": r"[A-Z][a-z]{2,5}-\d"}, r"[A-Z][a-z]{2,5}-\d", id="regex"),
        pytest.param({"grammar": GRAMMAR}, r"yes|no \d{1,3}", id="grammar"),
        pytest.param(
            {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": EBNF},
            r"yes|no \d",
            id="guide-ebnf",
        ),
        pytest.param(
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a{3}"},
            "aaa",
            id="guide-regex",
        ),
    ],
)
def test_an_answer_has_the_form_that_was_asked_for(
    values: dict[str, Any], fits: Any, seed: int
) -> None:
    answer = held(values, seed=seed)
    assert answer.finish_reason == "stop"
    assert fits(answer.text) if callable(fits) else re.fullmatch(fits, answer.text), answer.text


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["json_schema", "guided_decoding_guide"])
def test_an_answer_fits_its_schema(name: str, seed: int) -> None:
    kind = {} if name == "json_schema" else {"guided_decoding_guide_type": "json_schema"}
    answer = held({name: json.dumps(PERSON), **kind}, seed=seed)
    assert answer.finish_reason == "stop"
    Draft202012Validator(PERSON).validate(json.loads(answer.text))


@pytest.mark.parametrize("values", [{"json_object": True}, {"guided_decoding_guide_type": "json"}])
def test_any_object_is_json_or_says_that_it_was_cut(values: dict[str, Any]) -> None:
    reasons = set()
    for seed in range(6):
        answer = held(values, seed=seed, max_tokens=60)
        reasons.add(answer.finish_reason)
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)
        else:
            assert answer.finish_reason == "length"
            assert len(answer.token_ids) == 60


def test_a_schema_that_refers_to_itself_is_kept() -> None:
    answers = [held({"json_schema": json.dumps(TREE)}, seed=seed) for seed in range(4)]
    for answer in answers:
        if answer.finish_reason == "stop":
            Draft202012Validator(TREE).validate(json.loads(answer.text))
    assert any(answer.finish_reason == "stop" for answer in answers)


LEAVES = st.sampled_from(
    [
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"type": "string", "format": "date"},
        {"type": "integer", "minimum": -5, "maximum": 40},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["x", 3, None, {"a": [True]}]},
        {"const": "naïve"},
        {"type": ["string", "null"], "maxLength": 2},
    ]
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from(["a", "b c", "ü", '"']), inner, max_size=3)
    return st.one_of(
        properties.flatmap(
            lambda found: st.sets(st.sampled_from([*found, "z"])).map(
                lambda required: {
                    "type": "object",
                    "properties": found,
                    "required": sorted(required & set(found)),
                    "additionalProperties": False,
                }
            )
        ),
        st.tuples(inner, st.integers(0, 2)).map(
            lambda two: {"type": "array", "items": two[0], "maxItems": two[1]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    )


@settings(max_examples=60, deadline=None)
@given(schema=st.recursive(LEAVES, objects, max_leaves=6), seed=st.integers(0, 9))
def test_whatever_the_schema_no_answer_breaks_it(schema: dict[str, Any], seed: int) -> None:
    assert kept(schema, seed)


def test_every_answer_fits_its_schema_or_the_schema_was_refused() -> None:
    assert sum(map(len, SCHEMAS.values())) > 300
    reasons = Counter(kept(schema, seed) for seed, schema in enumerate(chain(*SCHEMAS.values())))
    assert reasons["stop"] > 220
    # What llguidance does not know of JSON Schema; one more is a loss, one less a gain.
    assert reasons[None] == 79


def test_what_leaves_no_choice_is_told_before_it_is_chosen() -> None:
    schema = {"type": "object", "properties": {"description": {"const": "nothing"}},
              "required": ["description"], "additionalProperties": False}  # fmt: skip
    asked = {"json_schema": json.dumps(schema)}
    chosen = held(asked, seed=1)
    generation, sampler = begun(asked, 1, 200)
    liked, runs = np.random.default_rng(1), 0
    while not generation.done:
        generation.push(sampler.choose(liked.normal(scale=3, size=VOCABULARY)))
        for token in sampler.forced():
            generation.push(token)
            liked.normal(size=VOCABULARY)
            runs += 1
    assert generation.token_ids == chosen.token_ids
    assert runs > len(generation.token_ids) / 2


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "3"}, "json_schema takes a JSON object"),
        ({"json_schema": '{"not": {"type": "string"}}'}, "Unimplemented keys"),
        ({"json_schema": '{"$ref": "#"}'}, "nothing has this form"),
        ({"json_schema": '{"pattern": "["}'}, "regex parse error: error: unclosed"),
        ({"json_schema": '{"$ref": "file:///etc/passwd"}'}, "retrieving it failed"),
        ({"json_schema": '{"type": "strin"}'}, "the json schema cannot be kept to"),
        ({"json_schema": '{"a":' * 70 + "1" + "}" * 70}, "nested deeper than 64"),
        ({"json_schema": json.dumps({"const": "x" * 70_000})}, "at most 65536"),
        ({"regex": "a(b"}, "the regex cannot be kept to"),
        ({"grammar": "start: nothing"}, "the grammar cannot be kept to"),
        ({"regex": "a", "choice": ["b"]}, "held to one form: send choice or regex"),
        ({"regex": "a", "ignore_eos": True}, "cannot go with ignore_eos"),
        ({"regex": "a", "min_tokens": 3}, "cannot go with min_tokens"),
        ({"guided_decoding_guide": "a"}, "guided_decoding_guide_type is one of json, "),
        ({"guided_decoding_guide_type": "regex"}, "needs guided_decoding_guide"),
        ({"guided_decoding_guide_type": "json", "regex": "a"}, "does not go with regex"),
        ({"json_schema": 3}, "json_schema takes text, not 3"),
    ],
)
def test_a_form_that_cannot_be_kept_to_is_refused_in_one_line(
    values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as refused:
        held(values)
    assert "\n" not in str(refused.value)


def test_what_was_compiled_is_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    held({"regex": "a"})
    compiler = FORMATTER._compiler
    assert compiler is not None
    compile_form = compiler._compile

    def counting(form: tuple[str, str]) -> Any:
        compiled.append(form)
        return compile_form(form)

    monkeypatch.setattr(compiler, "_compile", counting)
    for _ in range(2):
        held({"regex": "b"})
    assert compiled == [("regex", "b")]
    for number in range(70):
        held({"regex": f"c{number}"})
    held({"regex": "b"})
    assert compiled.count(("regex", "b")) == 2
    assert len(compiler._compiled) <= 64


def test_a_tokenizer_that_nobody_can_read_is_refused() -> None:
    class Own:
        eos_ids = frozenset({0})

    generation = Generation(
        [1], read_params({"regex": "a"}), max_tokens=4, eos_ids=frozenset({0}), decode=str
    )
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        TextFormatter({}, FOLDER).constrain(generation, Own())  # type: ignore[arg-type]
