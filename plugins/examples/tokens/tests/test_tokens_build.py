"""What a build writes into the repository, and what it refuses before Triton would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.plugin import ModelSourceError, OptionError, demo_model_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_path(), tmp_path / "model"))


def build(model: Path, **extra: Any) -> Path:
    output = model.parent / "repository"
    built = llmserve.build("hf", str(model), tokenizer="tokenizers", output=output, **extra)
    return built.folder


def test_small_files_are_copied_even_if_weights_are_not(model: Path) -> None:
    folder = build(model, weights="reference")
    assert {path.name for path in (folder / "1" / "tokens").iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    manifest = json.loads((folder / "llmserve.json").read_text())
    assert manifest["components"]["tokenizer"]["settings"] == {"path": "tokens"}
    assert {"jinja2", "llmserve-tokens", "tokenizers"} <= manifest["packages"].keys()


def test_a_model_without_the_file_is_refused_with_a_hint(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelSourceError, match=r"no tokenizer\.json: choose --tokenizer transf"):
        build(model)


def test_a_file_that_the_library_cannot_read_is_refused(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Acme"}}')
    with pytest.raises(ModelSourceError, match="cannot be used") as caught:
        build(model)
    assert "\n" not in str(caught.value)


def test_a_template_that_does_not_compile_is_refused(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ModelSourceError, match="cannot be used"):
        build(model)


def test_chat_without_a_template_is_refused(model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match="has no chat template"):
        build(model, chat=True)
