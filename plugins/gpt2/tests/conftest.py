"""What the tests on a real Triton share: a model that is exported in a third of the time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llmserve.demo import demo_model_path


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo model without the upper half of its layers."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("gpt2") / "small"
    # Before the weights, so that what says how many layers there are is written over.
    shutil.copytree(demo_model_path(), folder)
    AutoModelForCausalLM.from_pretrained(demo_model_path(), n_layer=2).save_pretrained(folder)
    return folder
