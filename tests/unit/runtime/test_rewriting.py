"""Schemas in the words that can be enforced: each accepts what the original does."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import llguidance
import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import extend

import llmserve.demo
from llmserve.runtime.answer.rewriting import enforceable

TOKENIZER = Path(llmserve.demo.__file__).parent / "model" / "tokenizer.json"
VALUES: list[Any] = [None, True, 0, 1, 1.0, "a", "b", "", []]
OBJECTS: list[Any] = [
    {name: value for name, value in zip("kab", values, strict=True) if value != "absent"}
    for values in product(["absent", "x", "y", 1, True], ["absent", 1, "s"], ["absent", 1])
]
LISTS: list[Any] = [list(each) for n in range(4) for each in product(["x", "y", 1], repeat=n)]
INSTANCES = [*VALUES, *OBJECTS, *LISTS, {"aa": 1}, {"x": 1}, {"x": 1, "y": "s"}, {"zz": 1}]


def tagged(tag: str, **more: Any) -> dict[str, Any]:
    properties = {"k": {"const": tag, "type": "string"}, **more}
    return {"type": "object", "properties": properties, "required": ["k", *more]}


K = {"type": "object", "properties": {"k": {"enum": ["x", "y"]}, "a": {"type": "integer"}}}
OF_X = {"properties": {"k": {"const": "x"}}, "required": ["k"]}
EXACT: dict[str, dict[str, Any]] = {
    "names are text": {"type": "object", "propertyNames": {"type": "string"}},
    "names are anything": {"type": "object", "propertyNames": {}},
    "names by a pattern": {"type": "object", "propertyNames": {"pattern": "^a+$"},
                           "additionalProperties": {"type": "integer"}},
    "names by a list": {"type": "object", "propertyNames": {"enum": ["x", "y"]},
                        "additionalProperties": {"type": "integer"}, "required": ["x"]},
    "a list of a few values": {"type": "array", "items": {"enum": ["x", "y", 1]},
                               "uniqueItems": True, "minItems": 1},
    "no repetition is wanted": {"type": "array", "items": {"type": "integer"},
                                "uniqueItems": False},
    "at most one": {"type": "array", "uniqueItems": True, "maxItems": 1},
    "a note for a format": {"type": "string", "format": "binary"},
    "a discriminated union": {
        "oneOf": [{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/Y"}],
        "discriminator": {"propertyName": "k"},
        "$defs": {"X": tagged("x", a={"type": "integer"}), "Y": tagged("y")},
    },
    "one of several kinds": {"oneOf": [{"type": "string"}, K]},
    "one of two keys": {**K, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one of several values": {"oneOf": [{"const": "a"}, {"enum": ["b", 1]}]},
    "a closed one": {"oneOf": [
        {"type": "object", "properties": {"a": {}}, "required": ["a"],
         "additionalProperties": False},
        {"type": "object", "properties": {"b": {}}, "required": ["b"],
         "additionalProperties": False}]},
    "what a key requires": {**K, "dependentRequired": {"a": ["b"]}},
    "what a key requires, as of old": {**K, "dependencies": {"a": ["b"], "b": OF_X}},
    "a schema for a key": {**K, "dependentSchemas": {"a": OF_X}},
    "if, then": {**K, "if": OF_X, "then": {"required": ["a"]}},
    "if, then, else": {**K, "if": {"properties": {"k": {"const": "x"}}},
                       "then": {"required": ["a"]}, "else": {"required": ["b"]}},
    "if a key is there": {**K, "if": {"required": ["a"]}, "else": {"required": ["b"]}},
    "then without if": {**K, "then": {"required": ["a"]}},
    "not a key": {**K, "not": {"required": ["a"]}},
    "not two keys": {**K, "not": {"required": ["a", "b"]}},
    "not a value": {"enum": ["a", "b", 1], "not": {"const": "a"}},
    "a flag that is set": {"type": "object", "properties": {"k": {"type": "boolean"}},
                           "if": {"properties": {"k": {"const": True}}, "required": ["k"]},
                           "then": {"required": ["a"]}},
    "within": {"type": "array", "items": {**K, "dependentRequired": {"a": ["b"]}}},
}  # fmt: skip
LEFT: dict[str, dict[str, Any]] = {
    "any number, or a whole one": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    "free items": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "not a kind": {"not": {"type": "string"}},
    "a condition on free text": {"type": "object", "properties": {"k": {"type": "string"}},
                                 "if": {"properties": {"k": {"const": "x"}}},
                                 "then": {"required": ["a"]}},
    "two objects": {"oneOf": [tagged("x"), {"type": "object", "properties": {"a": {}}}]},
    "a list of lists": {"type": "array", "items": {"enum": [[1], [2]]}, "uniqueItems": True},
}  # fmt: skip
# Draft 7's word, which the validator of 2020-12 leaves out.
Validator = extend(
    Draft202012Validator,
    {
        "dependencies": lambda validator, depends, instance, schema: (
            error
            for name, needed in depends.items()
            if isinstance(instance, dict) and name in instance
            for error in validator.descend(
                instance, {"required": needed} if isinstance(needed, list) else needed
            )
        )
    },
)


def accepts(schema: Any) -> list[bool]:
    return [Validator(schema).is_valid(instance) for instance in INSTANCES]


def compiles(schema: Any, text: str = "") -> bool:
    """Return whether llguidance takes a schema and, if there is one, a text in it."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    table = llguidance.LLTokenizer(TOKENIZER.read_text())
    matcher = llguidance.LLMatcher(table, grammar, log_level=0)
    if matcher.is_error() or not text:
        return not matcher.is_error()
    ids = table.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize("name", EXACT)
def test_a_schema_is_enforced_with_its_own_meaning(name: str) -> None:
    schema = EXACT[name]
    kept = deepcopy(schema)
    changed = enforceable(schema)
    assert schema == kept
    assert changed != schema
    assert accepts(changed) == accepts(schema)
    assert {*accepts(schema)} == {True, False}
    assert compiles(changed)


def test_what_is_accepted_is_enforced_as_it_is_meant() -> None:
    for name in ("a discriminated union", "what a key requires", "if, then", "names by a list"):
        changed = enforceable(EXACT[name])
        for instance in (each for each in INSTANCES if isinstance(each, dict)):
            # Keys have an order, in which properties are listed.
            valid = Validator(changed).is_valid(instance)
            assert valid or not compiles(changed, json.dumps(instance)), (name, instance)


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_said_exactly_is_left_to_be_refused(name: str) -> None:
    assert enforceable(LEFT[name]) == LEFT[name]
    assert not compiles(LEFT[name])


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"propertyNames": {"type": "string"}, "not": {"type": "null"}}},
        {"const": {"uniqueItems": False, "format": "binary"}},
        {"enum": [{"then": 1}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"oneOf": []},
        {"format": "date"},
    ],
)
def test_what_only_looks_like_a_keyword_is_kept(schema: Any) -> None:
    assert enforceable(schema) == schema
