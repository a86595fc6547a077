"""A large encoder is converted in the memory of a few of its layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from llmserve.testing.memory import most_memory, of_cuda
from llmserve.testing.needs import read_size
from llmserve.testing.tiny_encoders import save_tokenizer
from llmserve_embed.needs import openvino_needs

pytestmark = [pytest.mark.long, pytest.mark.alone]


def test_converting_takes_what_the_plugin_says(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tokenizer(model)
    config = BertConfig(
        vocab_size=30000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=10,
        num_attention_heads=16,
    )  # fmt: skip
    BertModel(config).to(torch.bfloat16).save_pretrained(model)
    settings = {
        "loader": "AutoModel", "padding": 0, "weight_format": "auto", "pickle": False,
        "trust_remote_code": False,
    }  # fmt: skip
    program = ["-m", "llmserve_embed.convert", str(model), str(tmp_path / "ov")]
    most = most_memory([sys.executable, *program, json.dumps(settings)]) - of_cuda()
    size = read_size(model)
    expected = openvino_needs(size, {"weight_format": "auto", "file": "", "dtype": "auto"}).build
    # All weights in float32 are 0.63 GB, of which OpenVINO would make two copies.
    assert expected / 1.5 < most < 1.15 * expected
