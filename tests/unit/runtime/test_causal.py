"""The dtype a model is loaded in depends on the processor that serves it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llmserve.hardware import computes_in
from llmserve.runtime import causal
from llmserve.runtime.causal import load, original_length
from tests.support import edit_json

PLAIN, NATIVE = "avx2", "avx2 avx512_bf16"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("checkpoint")
    config = GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("requested", "stored", "flags", "expected", "warned"),
    [
        ("auto", "bfloat16", PLAIN, torch.float32, False),
        ("auto", "bfloat16", NATIVE, torch.bfloat16, False),
        ("auto", "float16", "amx_bf16", torch.bfloat16, False),
        ("auto", "float32", NATIVE, torch.float32, False),
        # A dtype without native instructions is loaded with a warning about its cost.
        ("bfloat16", "float32", PLAIN, torch.bfloat16, True),
        ("bfloat16", "float32", NATIVE, torch.bfloat16, False),
    ],
)
def test_the_dtype_is_chosen_by_processor_and_checkpoint(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    requested: str,
    stored: str,
    flags: str,
    expected: torch.dtype,
    warned: bool,
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"flags\t: {flags}\n")
    monkeypatch.setattr(causal, "computes_in", partial(computes_in, root=tmp_path))
    edit_json(checkpoint / "config.json", dtype=stored)
    model: Any = load({"path": ".", "dtype": requested, "device": "cpu"}, checkpoint)
    assert model.dtype == expected
    assert ("tenth of the speed" in caplog.text) == warned


def test_longrope_is_found_as_old_and_new_configurations_have_it() -> None:
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 40}
    old = {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 41}
    assert original_length({"rope_parameters": longrope}) == 40
    assert original_length({"rope_parameters": {"full_attention": longrope}}) == 40
    assert original_length(old) == 41
    assert original_length({"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": None}) is None
