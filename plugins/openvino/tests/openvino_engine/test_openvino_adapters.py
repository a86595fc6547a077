"""Adapters beside a converted model."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from llmserve.graphs import StoredWeights, openvino
from llmserve.testing.adapters import AdapterConformance
from llmserve.testing.tiny_models import make_model
from llmserve_openvino.runner import make_runner
from llmserve_openvino.trace import convert

pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def converted(family: str) -> Any:
    """Return the file of a tiny model; the folder goes with the first of the two."""
    folder = tempfile.TemporaryDirectory()
    model = make_model(family)
    path = Path(folder.name) / "openvino_model.xml"
    openvino.save_model(convert(model, StoredWeights(model)), str(path), compress_to_fp16=False)
    return folder, path


class TestAdapters(AdapterConformance):
    targets: ClassVar[dict[str, tuple[str, ...]]] = {
        "gpt2": ("c_attn", "c_fc"),
        "llama": ("q_proj", "v_proj", "down_proj"),
        "falcon": ("query_key_value", "dense"),
    }

    def make_runner(self, family: str, tokens: int) -> Any:
        exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        return make_runner(converted(family)[1], exact, cache_tokens=tokens)
