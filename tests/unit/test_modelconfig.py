"""config.pbtxt: what is written is what was meant, and what is wrong is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.builder.causal import place_instances
from llmserve.errors import ConfigError, OptionError
from llmserve.repository import config as modelconfig
from llmserve.runtime.contract import SAMPLING, STOP_WORDS, TEXT_INPUT, TEXT_OUTPUT

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT, TEXT)
def test_any_text_survives(key: str, value: str) -> None:
    config = modelconfig.new_config("m", backend="python", max_batch_size=8)
    modelconfig.set_parameters(config, {key: value, "other": "${not a placeholder}"})
    read = modelconfig.parse(modelconfig.to_text(config), where="here")
    assert read.parameters[key].string_value == (
        "${not a placeholder}" if key == "other" else value
    )


def test_batched_and_unbatched_dims() -> None:
    for size, dims in ((8, [1]), (0, [-1])):
        config = modelconfig.new_config("m", backend="python", max_batch_size=size)
        modelconfig.add_inputs(config, [TEXT_INPUT, STOP_WORDS, *SAMPLING])
        modelconfig.add_outputs(config, [TEXT_OUTPUT])
        by_name = {tensor.name: tensor for tensor in config.input}
        assert list(by_name["text_input"].dims) == dims
        assert list(config.output[0].dims) == dims
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
def test_a_model_is_placed_once_unless_asked(device: str, kind: str, gpus: list[int]) -> None:
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
def test_what_is_no_configuration_is_refused_with_its_place(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.pbtxt is not a Triton configuration: 1:"):
        modelconfig.read(tmp_path)
