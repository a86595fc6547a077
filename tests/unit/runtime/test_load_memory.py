"""A model with experts is loaded in the memory that the plan says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from llmserve.builder.causal import place_needs
from llmserve.builder.size import size_in
from llmserve.plugin import Value
from llmserve.testing.memory import most_memory

pytestmark = [pytest.mark.long, pytest.mark.alone]
_LOAD = """
import sys
from pathlib import Path
from llmserve.runtime.causal import load
folder = Path(sys.argv[1])
load({"path": str(folder), "device": "cpu", "dtype": sys.argv[2]}, folder)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_are_joined_in_the_memory_of_a_layer(dtype: str, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=1000, hidden_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=2,
        moe_intermediate_size=512,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    # As Triton is started.
    program = ["env", "MALLOC_MMAP_THRESHOLD_=33554432", sys.executable, "-c", _LOAD]
    most = most_memory([*program, str(tmp_path), dtype])
    size = size_in(tmp_path)
    assert size is not None
    options: dict[str, Value] = {"device": "cpu", "dtype": dtype, "weights": "copy", "instances": 1}
    layer = 12 * config.num_experts * config.hidden_size * config.moe_intermediate_size
    assert most < 1.15 * place_needs(size, options).served + (layer if dtype == "float32" else 0)
