"""What is read of a model that makes embeddings, without a build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.encoders import encoder_layout
from llmserve.builder.source import ModelSource


def source(folder: Path, /, **files: Any) -> ModelSource:
    """Return a model of these files, each with its content; names have no suffix."""
    files.setdefault("config", {"architectures": ["BertModel"]})
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return ModelSource("model", folder)


def modules(*kinds: tuple[str, str]) -> list[dict[str, str]]:
    return [{"type": kind, "path": path} for kind, path in kinds]


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "last"),
        ({"architectures": ["Qwen2ForCausalLM"], "is_causal": True}, "last"),
        ({"architectures": ["Qwen2ForCausalLM"], "is_causal": False}, "mean"),
        ({"architectures": ["Qwen2Model"]}, "mean"),
        ({}, "mean"),
    ],
)
def test_a_decoder_without_modules_is_pooled_at_its_last_token(
    tmp_path: Path, config: dict[str, Any], pooling: str
) -> None:
    assert encoder_layout(source(tmp_path, config=config)).pooling == pooling


def test_a_decoder_with_modules_is_pooled_as_they_say(tmp_path: Path) -> None:
    model = source(
        tmp_path,
        config={"architectures": ["Qwen2ForCausalLM"]},
        modules=modules(
            ("sentence_transformers.models.Transformer", ""),
            ("sentence_transformers.models.Pooling", "1_Pooling"),
        ),
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    assert encoder_layout(model).pooling == "mean"
