"""A graph is exported in the memory that the plugin says, whatever the size of the model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from llmserve.testing.memory import most_memory
from llmserve.testing.needs import read_size
from llmserve_gpt2 import llmserve_register_generators

pytestmark = [pytest.mark.long, pytest.mark.alone]
_EXPORT = """
import sys
from pathlib import Path
from llmserve_gpt2.export.mapped import load
from llmserve_gpt2.export.run import export
source, form, folder = sys.argv[1:]
with load(Path(source), Path(folder), pickle=False, trust_remote_code=False) as model:
    export(model, form, Path(folder), name="it", report=lambda _: None)
"""


@pytest.mark.parametrize(("form", "layers"), [("onnx", 6), ("torchscript", 6), ("torchscript", 14)])
def test_an_export_takes_what_the_plugin_says(form: str, layers: int, tmp_path: Path) -> None:
    model, target = tmp_path / "model", tmp_path / "graph"
    target.mkdir()
    config = GPT2Config(n_embd=1280, n_layer=layers, n_head=20)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(model)
    most = most_memory([sys.executable, "-c", _EXPORT, str(model), form, str(target)])
    size = read_size(model)
    generators = {generator.name: generator for generator in llmserve_register_generators()}
    needs = generators[f"graph-{form}"].needs
    assert needs is not None
    # The weights are 0.73 GB in float32, or 1.36, and were in memory twice and more.
    assert most < 1.15 * needs(size, {"device": "cpu"}).build < 1_800_000_000
