"""In which type a model is loaded, by the processor that serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llmserve.runtime.causal import load

PLAIN: dict[str, bool] = {"avx2": True}
NATIVE = {"avx2": True, "avx512_bf16": True}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    return tmp_path


def loaded_dtype(folder: Path, asked: str, stored: str = "float32") -> torch.dtype:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "dtype": stored}), encoding="utf-8")
    model: Any = load({"path": ".", "dtype": asked, "device": "cpu"}, folder)
    found: torch.dtype = model.dtype
    return found


@pytest.mark.parametrize(
    ("stored", "capabilities", "expected"),
    [
        ("bfloat16", PLAIN, torch.float32),
        ("bfloat16", NATIVE, torch.bfloat16),
        ("float16", {"amx_bf16": True}, torch.bfloat16),
        ("float32", NATIVE, torch.float32),
    ],
)
def test_auto_is_chosen_by_processor_and_checkpoint(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    capabilities: dict[str, bool],
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert loaded_dtype(checkpoint, "auto", stored) == expected


def test_a_type_without_instructions_is_loaded_with_a_warning_of_its_cost(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: PLAIN)
    assert loaded_dtype(checkpoint, "bfloat16") == torch.bfloat16
    assert "tenth of the speed" in caplog.text
    caplog.clear()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: NATIVE)
    assert loaded_dtype(checkpoint, "bfloat16") == torch.bfloat16
    assert not caplog.text
