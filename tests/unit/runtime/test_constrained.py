"""Constrained answers from random scores: whatever the model prefers, they keep the form."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
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
from llmserve.runtime.answer import judge
from llmserve.runtime.answer.params import read_params
from llmserve.runtime.answer.text_formatter import TextFormatter

FOLDER = Path(llmserve.demo.__file__).parent / "model"
TOKENIZER = TransformersTokenizer({"path": "."}, FOLDER)
FORMATTER = TextFormatter({}, FOLDER)
# More scores than the tokenizer has tokens, as models with a padded vocabulary have.
VOCABULARY = 1024 + 64
ENDS = np.array([token in TOKENIZER.eos_ids or bool({*TOKENIZER.decode([token])} & {*'"]}'})
                 for token in range(VOCABULARY)])  # fmt: skip
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
"""Schemas from public JSON Schema test material, and schemas as people send them to models."""

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


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    FORMATTER.close()


def start(values: Mapping[str, Any], seed: int, max_tokens: int) -> tuple[Generation, Sampler]:
    """Return a constrained generation and its sampler."""
    generation = Generation(
        TOKENIZER.encode("Tell me"),
        read_params({"temperature": 1.0, "seed": seed, **values}),
        max_tokens=max_tokens,
        eos_ids=TOKENIZER.eos_ids,
        decode=TOKENIZER.decode,
    )
    generation.constraint = FORMATTER.constrain(generation, TOKENIZER)
    return generation, Sampler(generation, TOKENIZER)


def generate(
    values: Mapping[str, Any], *, seed: int = 0, max_tokens: int = 200, hurry: float = 0
) -> Generation:
    """Return a generation from random scores; ``hurry`` makes tokens that end a form likelier."""
    generation, sampler = start(values, seed, max_tokens)
    rng = np.random.default_rng(seed)
    while not generation.done:
        scores = rng.normal(scale=3, size=VOCABULARY)
        generation.push(sampler.choose(scores + ENDS * (hurry * len(generation.token_ids))))
    return generation


def check_schema(schema: Any, seed: int) -> str | None:
    """Answer at random and validate the answer; return why it ended, None if it was refused."""
    try:
        answer = generate({"json_schema": json.dumps(schema)}, seed=seed, max_tokens=160, hurry=0.1)
    except RequestError as error:
        return None if "\n" not in str(error) else str(error)
    if answer.finish_reason == "stop":
        kind = validator_for(schema, default=Draft202012Validator)
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(answer.text))
    else:
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == 160
    return answer.finish_reason


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param(
            {"choice": ["red", "green (light)", "a|b", "naïve 🦙"]},
            r"red|green \(light\)|a\|b|naïve 🦙",
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
def test_an_answer_has_the_requested_form(values: dict[str, Any], expected: str, seed: int) -> None:
    answer = generate(values, seed=seed)
    assert answer.finish_reason == "stop"
    assert re.fullmatch(expected, answer.text), answer.text


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["json_schema", "guided_decoding_guide"])
def test_an_answer_fits_its_schema(name: str, seed: int) -> None:
    kind = {} if name == "json_schema" else {"guided_decoding_guide_type": "json_schema"}
    answer = generate({name: json.dumps(PERSON), **kind}, seed=seed)
    assert answer.finish_reason == "stop"
    Draft202012Validator(PERSON).validate(json.loads(answer.text))


@pytest.mark.parametrize("values", [{"json_object": True}, {"guided_decoding_guide_type": "json"}])
def test_any_object_is_json_or_was_cut(values: dict[str, Any]) -> None:
    for seed in range(6):
        answer = generate(values, seed=seed, max_tokens=60)
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)
        else:
            assert answer.finish_reason == "length"
            assert len(answer.token_ids) == 60


@pytest.mark.parametrize("kind", ["date-time", "time"])
def test_a_time_ends_after_its_nanoseconds(kind: str) -> None:
    when = {"type": "string", "format": kind}
    schema = {"type": "object", "properties": {"when": when}, "required": ["when"],
              "additionalProperties": False}  # fmt: skip
    for seed in range(4):
        generation, sampler = start({"json_schema": json.dumps(schema)}, seed, 200)
        digits = np.array([TOKENIZER.decode([token]).isdigit() for token in range(VOCABULARY)])
        while not generation.done:
            # A model that would rather write digits than anything else.
            generation.push(sampler.choose(30.0 * digits))
        assert generation.finish_reason == "stop"
        assert len(json.loads(generation.text)["when"]) <= 35


@pytest.mark.parametrize("kind", ["date", "date-time"])
@pytest.mark.parametrize(
    ("day", "exists"),
    [
        ("3106-02-29", False), ("1900-02-29", False), ("0000-01-01", False), ("0100-02-29", False),
        ("2024-02-29", True), ("2000-02-29", True), ("0004-02-29", True), ("2026-11-30", True),
    ],
)  # fmt: skip
def test_a_day_that_is_written_exists(kind: str, day: str, exists: bool) -> None:
    when = {"type": "string", "format": kind, "allOf": [{"minLength": 1}]}
    schema = {"type": "object", "properties": {"when": when}, "required": ["when"],
              "additionalProperties": False}  # fmt: skip
    wanted = f'{{"when":"{day}'
    generation, sampler = start({"json_schema": json.dumps(schema)}, 0, 200)
    characters = [TOKENIZER.decode([token]) for token in range(VOCABULARY)]
    while not generation.done:
        at = len(TOKENIZER.decode(generation.token_ids))
        next_one = wanted[at : at + 1]
        generation.push(sampler.choose(np.array([30.0 * (c == next_one) for c in characters])))
    written = json.loads(generation.text)["when"]
    assert (written[:10] == day) == exists
    checker = Draft202012Validator.FORMAT_CHECKER
    Draft202012Validator(schema, format_checker=checker).validate({"when": written.upper()})


@pytest.mark.parametrize("name", ["default", "const", "format", "properties"])
def test_a_property_may_have_the_name_of_a_keyword(name: str) -> None:
    day = {"type": "string", "format": "date"}
    inner = {"type": "object", "properties": {name: day}, "required": [name],
             "additionalProperties": False}  # fmt: skip
    assert '"pattern"' in judge._with_leap_years(json.dumps(inner))
    counted = {"type": "object", "minProperties": 3}
    with pytest.raises(judge.UnenforceableError):
        judge._check_keys({"type": "object", "properties": {name: counted}})
    assert (
        judge._with_leap_years('{"const": {"format": "date"}}') == '{"const": {"format": "date"}}'
    )


def test_a_value_that_looks_like_a_time_is_no_schema() -> None:
    value = {"format": "date-time"}
    answer = generate({"json_schema": json.dumps({"const": value})})
    assert json.loads(answer.text) == value


def test_a_schema_that_refers_to_itself_is_kept() -> None:
    answers = [generate({"json_schema": json.dumps(TREE)}, seed=seed) for seed in range(4)]
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
            lambda drawn: st.sets(st.sampled_from([*drawn, "z"])).map(
                lambda required: {
                    "type": "object",
                    "properties": drawn,
                    "required": sorted(required & set(drawn)),
                    "additionalProperties": False,
                }
            )
        ),
        st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: {"type": "array", "items": pair[0], "maxItems": pair[1]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas}),
    )


@settings(max_examples=60, deadline=None)
@given(schema=st.recursive(LEAVES, objects, max_leaves=6), seed=st.integers(0, 9))
def test_no_answer_breaks_its_schema(schema: dict[str, Any], seed: int) -> None:
    assert check_schema(schema, seed)


def test_every_answer_fits_its_schema_or_the_schema_was_refused() -> None:
    assert sum(map(len, SCHEMAS.values())) > 300
    schemas = chain(*SCHEMAS.values())
    reasons = Counter(check_schema(schema, seed) for seed, schema in enumerate(schemas))
    assert reasons["stop"] > 220
    # The schemas that cannot be enforced; one more is a loss, one fewer a gain.
    assert reasons[None] == 71


def test_forced_tokens_are_known_before_they_are_chosen() -> None:
    schema = {"type": "object", "properties": {"description": {"const": "nothing"}},
              "required": ["description"], "additionalProperties": False}  # fmt: skip
    values = {"json_schema": json.dumps(schema)}
    expected = generate(values, seed=1)
    generation, sampler = start(values, 1, 200)
    rng, forced = np.random.default_rng(1), 0
    while not generation.done:
        generation.push(sampler.choose(rng.normal(scale=3, size=VOCABULARY)))
        for token in sampler.forced():
            generation.push(token)
            rng.normal(size=VOCABULARY)
            forced += 1
    assert generation.token_ids == expected.token_ids
    assert forced > len(generation.token_ids) / 2


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "3"}, "json_schema takes a JSON object"),
        ({"json_schema": '{"not": {"type": "string"}}'}, "Unimplemented keys"),
        ({"json_schema": '{"$ref": "#"}'}, "no text matches it"),
        ({"json_schema": '{"pattern": "["}'}, "regex parse error: error: unclosed"),
        ({"json_schema": '{"$ref": "file:///etc/passwd"}'}, "retrieving it failed"),
        ({"json_schema": '{"type": "strin"}'}, "the json schema cannot be enforced"),
        ({"json_schema": '{"items": {"minProperties": 2}}'}, "needs additionalProperties false"),
        ({"json_schema": '{"a":' * 70 + "1" + "}" * 70}, "nested deeper than 64"),
        ({"json_schema": json.dumps({"const": "x" * 70_000})}, "at most 65536"),
        (
            {"call_schema": json.dumps({"const": "x" * 70_000}), "call_marks": ["x"]},
            "at most 65536",
        ),
        ({"regex": "a(b"}, "the regex cannot be enforced"),
        ({"grammar": "start: nothing"}, "the grammar cannot be enforced"),
        ({"regex": "a", "choice": ["b"]}, "only one constraint: send choice or regex"),
        ({"regex": "a", "ignore_eos": True}, "conflicts with ignore_eos"),
        ({"regex": "a", "min_tokens": 3}, "conflicts with min_tokens"),
        ({"guided_decoding_guide": "a"}, "guided_decoding_guide_type is one of json, "),
        ({"guided_decoding_guide_type": "regex"}, "needs guided_decoding_guide"),
        ({"guided_decoding_guide_type": "json", "regex": "a"}, "conflicts with regex"),
        ({"json_schema": 3}, "json_schema takes text, not 3"),
    ],
)
def test_an_invalid_form_is_refused_in_one_line(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        generate(values)
    assert caught.value.code in ("invalid_value", "conflicting_options")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 1},
        {"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 2},
        {"const": {"minProperties": 2}},
        {"properties": {"minProperties": {"type": "integer"}}, "additionalProperties": False},
    ],
)
def test_a_number_of_keys_that_no_key_can_make_up_twice_is_enforced(schema: Any) -> None:
    assert generate({"json_schema": json.dumps(schema)})


def test_the_cache_of_compiled_forms_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    generate({"regex": "a"})
    compiler = FORMATTER._compiler
    assert compiler is not None
    compile_form = compiler._compile

    def counting(form: tuple[str, str]) -> Any:
        compiled.append(form)
        return compile_form(form)

    monkeypatch.setattr(compiler, "_compile", counting)
    for _ in range(2):
        generate({"regex": "b"})
    assert compiled == [("regex", "b")]
    for number in range(70):
        generate({"regex": f"c{number}"})
    generate({"regex": "b"})
    assert compiled.count(("regex", "b")) == 2
    assert len(compiler._compiled) <= 64


def test_a_tokenizer_without_a_file_is_refused() -> None:
    class CustomTokenizer:
        eos_ids = frozenset({0})

    generation = Generation(
        [1], read_params({"regex": "a"}), max_tokens=4, eos_ids=frozenset({0}), decode=str
    )
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        TextFormatter({}, FOLDER).constrain(generation, CustomTokenizer())  # type: ignore[arg-type]
