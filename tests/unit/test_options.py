"""Options: types, ranges and near names."""

from __future__ import annotations

from typing import Any

import pytest

from llmserve.errors import OptionError, UsageError
from llmserve.names import check_model_name, model_name_from, near
from llmserve.options import INT32_MAX, Option, parse_assignments, resolve

SIZE = Option("size", 8, "A size.", minimum=0, maximum=64)
RATE = Option("rate", 0.5, "A rate.", maximum=1)
KIND = Option("kind", "a", "A kind.", choices=("a", "b"))
FLAG = Option("flag", False, "A flag.")
ALL = (SIZE, RATE, KIND, FLAG)


def test_what_is_not_given_has_its_default() -> None:
    assert resolve(ALL, {}) == {"size": 8, "rate": 0.5, "kind": "a", "flag": False}


def test_text_is_read_by_the_options_type() -> None:
    given = {"size": "16", "rate": "1", "kind": "b", "flag": "true"}
    assert resolve(ALL, given) == {"size": 16, "rate": 1.0, "kind": "b", "flag": True}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("size", "many", "whole number"),
        ("size", 1.5, "whole number"),
        ("size", True, "whole number"),
        ("size", -1, "at least 0"),
        ("size", "65", "at most 64"),
        ("rate", "nan", "rate must be"),
        ("rate", "fast", "a number"),
        ("flag", "yes", "true or false"),
        ("flag", 1, "true or false"),
        ("kind", "c", "choose one of a, b"),
        ("kind", 3, "text"),
    ],
)
def test_a_wrong_value_is_refused_with_what_would_do(name: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        resolve(ALL, {name: value})
    assert name in str(caught.value)


def test_whole_numbers_fit_into_where_they_are_written() -> None:
    """Those of Triton's configuration have 32 bits, an engine's parameters have 64."""
    from llmserve.builder.plan import known_options
    from llmserve.registry import Registry
    from llmserve.roles import Recipe

    registry = Registry.load()
    short = {"max_batch_size", "instances", "queue_delay_us", "max_tokens", "cache_tokens"}
    seen = set()
    for recipe in registry.all(Recipe):
        for option in known_options(recipe, registry):
            if type(option.default) is int:
                seen.add(option.name)
                value = INT32_MAX + 1 if option.name in short else 1 << 63
                with pytest.raises(OptionError, match=f"{option.name} must be at most"):
                    option.parse(str(value))
    assert short <= seen


def test_an_unknown_name_is_refused_with_the_near_one() -> None:
    with pytest.raises(OptionError, match="did you mean 'size'"):
        resolve(ALL, {"sise": 3})


def test_assignments_are_split_at_the_first_equals() -> None:
    assert parse_assignments(["a=b=c", "d="]) == {"a": "b=c", "d": ""}


@pytest.mark.parametrize("wrong", [["a"], ["=b"], ["a=1", "a=2"]])
def test_what_is_no_assignment_is_refused(wrong: list[str]) -> None:
    with pytest.raises(OptionError):
        parse_assignments(wrong)


@pytest.mark.parametrize("name", ["", ".", "-x", "a/b", "a b", "ü", "x" * 200, "a\n"])
def test_a_name_that_would_make_trouble_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_model_name(name)


@pytest.mark.parametrize("source", ["gpt2", "a/b", "./x/", "/tmp/My Model (1)", "...", "~"])
def test_a_name_made_from_any_source_can_be_used(source: str) -> None:
    assert check_model_name(model_name_from(source))


def test_near_names_are_suggested_else_all() -> None:
    assert near("dynamc", ["dynamic", "static"]) == "did you mean 'dynamic'?"
    assert near("zzz", ["b", "a"]) == "choose one of a, b"
