"""A model that a plugin cannot compute is built with the next one, or refused with its name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.fitted import build_fitted
from llmserve.plugin import BuildSpec, Registry, UnservedError, demo_model_path

pytestmark = pytest.mark.long
STATES = {"attention_hidden_size": 32}


def model_of(folder: Path, family: str, **settings: Any) -> Path:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, **settings,
    )  # fmt: skip
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("family", "settings", "plugin", "words"),
    [
        ("Rwkv", STATES, "iterative", ["keep a state"]),
    ],
)
def test_another_plugin_builds_what_the_first_cannot_compute(
    tmp_path: Path, family: str, settings: dict[str, Any], plugin: str, words: list[str]
) -> None:
    spec = BuildSpec("openvino", str(model_of(tmp_path / "model", family, **settings)))
    said: list[str] = []
    choice, built = build_fitted(
        BuildSpec(spec.plugin, spec.model, output=tmp_path / "repository"), Registry.load(),
        others=["iterative", "hf"], serves=False, change=None, report=said.append,
    )  # fmt: skip
    assert built.manifest.recipe == choice.chosen()["plugin"] == plugin
    notes = [line for line in said if line.startswith("note: ") and line.endswith("used instead")]
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_a_named_plugin_that_cannot_compute_it_names_the_one_that_can(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", "Rwkv", **STATES)
    spec = BuildSpec("openvino", str(model), output=tmp_path / "repository")
    with pytest.raises(UnservedError, match=r"keep a state.*: build it with --plugin iterative"):
        build_fitted(spec, Registry.load(), serves=False, change=None, report=lambda _: None)
    assert not (tmp_path / "repository").exists()
