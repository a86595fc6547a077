"""What the tests on a real Triton share: a model whose export takes less time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llmserve.demo import demo_model_path


def small_model(factory: pytest.TempPathFactory) -> Path:
    """Return the demo model with one of its layers, made once in a session."""
    folder = factory.getbasetemp() / "small-gpt2"
    if not folder.exists():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(demo_model_path(), n_layer=1)
        # Before the weights, so that what says how many layers there are is written over.
        shutil.copytree(demo_model_path(), folder)
        model.save_pretrained(folder)
    return folder
