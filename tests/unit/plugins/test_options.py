"""Options and names: types, ranges and near names; and Triton configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.builder.causal import place_instances
from llmserve.builder.plan import known_options
from llmserve.contract.options import SAMPLING, STOP_WORDS
from llmserve.contract.tensors import TEXT_INPUT, TEXT_OUTPUT
from llmserve.errors import ConfigError, OptionError, UsageError
from llmserve.names import check_model_name, model_name_from, near
from llmserve.plugins.options import INT32_MAX, Option, parse_assignments, resolve
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import Recipe
from llmserve.repository import config as modelconfig

OPTIONS = (
    Option("size", 8, "A size.", minimum=0, maximum=64),
    Option("rate", 0.5, "A rate.", maximum=1),
    Option("kind", "a", "A kind.", choices=("a", "b")),
    Option("flag", False, "A flag."),
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def test_text_is_parsed_by_the_options_type_and_a_missing_option_has_its_default() -> None:
    assert resolve(OPTIONS, {}) == {"size": 8, "rate": 0.5, "kind": "a", "flag": False}
    values = {"size": "16", "rate": "1", "kind": "b", "flag": "true"}
    assert resolve(OPTIONS, values) == {"size": 16, "rate": 1.0, "kind": "b", "flag": True}


def test_a_choice_changes_the_defaults_that_it_implies() -> None:
    implies = (("old", "size", 0), ("old", "flag", True), ("old", "elsewhere", 1))
    options = (*OPTIONS, Option("layout", "new", "A layout.", ("new", "old"), implies=implies))
    assert resolve(options, {})["size"] == 8
    old = resolve(options, {"layout": "old"})
    assert (old["size"], old["flag"]) == (0, True)
    assert "elsewhere" not in old
    assert resolve(options, {"layout": "old", "size": "4"})["size"] == 4
    wrong = Option("layout", "old", "A layout.", ("new", "old"), implies=(("old", "size", 65),))
    with pytest.raises(OptionError, match=r"layout=old implies size=65: .* at most 64"):
        resolve((*OPTIONS, wrong), {})


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
        ("sise", 3, "did you mean 'size'"),
    ],
)
def test_a_wrong_value_is_refused_with_the_fix(name: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        resolve(OPTIONS, {name: value})
    assert name in str(caught.value)


@pytest.mark.parametrize("default", [None, [1], b"a"])
def test_the_default_of_an_option_must_have_a_supported_type(default: Any) -> None:
    with pytest.raises(OptionError, match=r"option size has the default .*: give text"):
        Option("size", default, "A size.")


def test_whole_numbers_fit_where_they_are_stored() -> None:
    """Those in Triton's configuration have 32 bits, an engine's parameters have 64."""
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


def test_assignments_are_split_at_the_first_equals() -> None:
    assert parse_assignments(["a=b=c", "d="]) == {"a": "b=c", "d": ""}
    for wrong in (["a"], ["=b"], ["a=1", "a=2"]):
        with pytest.raises(OptionError):
            parse_assignments(wrong)


@pytest.mark.parametrize("name", ["", ".", "-x", "a/b", "a b", "ü", "x" * 200, "a\n"])
def test_an_unsafe_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_model_name(name)


@pytest.mark.parametrize("source", ["gpt2", "a/b", "./x/", "/tmp/My Model (1)", "...", "~"])
def test_a_name_derived_from_any_source_is_valid(source: str) -> None:
    assert check_model_name(model_name_from(source))


def test_near_names_are_suggested_else_all() -> None:
    assert near("dynamc", ["dynamic", "static"]) == "did you mean 'dynamic'?"
    assert near("zzz", ["b", "a"]) == "choose one of a, b"


@given(TEXT, TEXT)
def test_any_text_survives_a_configuration(key: str, value: str) -> None:
    config = modelconfig.new_config("m", backend="python", max_batch_size=8)
    modelconfig.set_parameters(config, {"other": "${not a placeholder}", key: value})
    parsed = modelconfig.parse(modelconfig.to_text(config), where="here")
    assert parsed.parameters[key].string_value == value


@pytest.mark.parametrize(("size", "dims"), [(8, [1]), (0, [-1])])
def test_batched_and_unbatched_dims(size: int, dims: list[int]) -> None:
    config = modelconfig.new_config("m", backend="python", max_batch_size=size)
    modelconfig.add_inputs(config, [TEXT_INPUT, STOP_WORDS, *SAMPLING])
    modelconfig.add_outputs(config, [TEXT_OUTPUT])
    by_name = {tensor.name: tensor for tensor in config.input}
    assert list(by_name["text_input"].dims) == list(config.output[0].dims) == dims
    assert list(by_name["temperature"].dims) == [1]
    assert by_name["stop_words"].allow_ragged_batch == (size > 0)
    assert by_name["temperature"].optional
    assert not by_name["text_input"].optional


@pytest.mark.parametrize(
    ("device", "kind", "gpus"),
    [
        ("auto", "KIND_MODEL", []),
        ("balanced", "KIND_MODEL", []),
        ("cpu", "KIND_CPU", []),
        ("cuda", "KIND_GPU", [0]),
        ("cuda:3", "KIND_GPU", [3]),
    ],
)
def test_a_model_has_one_instance_on_its_device(device: str, kind: str, gpus: list[int]) -> None:
    config = modelconfig.new_config("m", backend="python", max_batch_size=1)
    place_instances(config, device, 1)
    (group,) = config.instance_group
    assert (group.Kind.Name(group.kind), list(group.gpus), group.count) == (kind, gpus, 1)


@pytest.mark.parametrize(
    "device",
    ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "cuda:٣", "cuda:99999999999", "cuda:1\n"],
)
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(OptionError, match="device"):
        place_instances(modelconfig.new_config("m", backend="p", max_batch_size=1), device, 1)


@pytest.mark.parametrize("text", ["max_batch_size: ${size}", "nonsense: 3", "name: 'a", "\x00"])
def test_an_invalid_configuration_is_refused_with_its_position(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.pbtxt is not a Triton configuration: 1:"):
        modelconfig.read(tmp_path)
