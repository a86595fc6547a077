"""Which folders count as a model, for a generator that takes other weights than safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.errors import ModelSourceError
from llmserve.repository.source import resolve

OWN = ("*.safetensors", "engine_model.xml")


def model(folder: Path, *files: str) -> str:
    (folder / "config.json").write_text("{}")
    for name in files:
        (folder / name).touch()
    return str(folder)


@pytest.mark.parametrize("file", ["model.safetensors", "engine_model.xml"])
def test_any_of_the_generators_weights_will_do(file: str, tmp_path: Path) -> None:
    asked = model(tmp_path, file, "engine_model.bin")
    assert resolve(asked, weights=OWN, report=print).path == tmp_path


def test_what_one_generator_takes_another_does_not(tmp_path: Path) -> None:
    asked = model(tmp_path, "engine_model.xml")
    with pytest.raises(ModelSourceError, match=r"no weights: no \*\.safetensors in"):
        resolve(asked, report=print)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"no \*\.safetensors or engine_model\.xml in"):
        resolve(model(tmp_path), weights=OWN, report=print)
