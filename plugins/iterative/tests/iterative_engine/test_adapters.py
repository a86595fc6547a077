"""Adapters beside the engine's runners."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from llmserve.runtime import LoraError, read_lora
from llmserve.testing.adapters import AdapterConformance
from llmserve.testing.tiny_models import make_model
from llmserve_iterative.runner import make_runner


class TestAdapters(AdapterConformance):
    targets: ClassVar[dict[str, tuple[str, ...]]] = {
        "gpt2": ("c_attn", "c_fc"),
        "llama": ("q_proj", "v_proj", "down_proj"),
        "falcon": ("query_key_value", "dense"),
        # It runs in the padded runner.
        "falcon_alibi": ("query_key_value", "dense_4h_to_h"),
    }

    def make_runner(self, family: str, tokens: int) -> Any:
        return make_runner(make_model(family), tokens)

    def test_what_is_infinite_in_the_models_type_is_no_number(self, home: Path) -> None:
        """It would reach the rows of others: 0 times infinity is no number."""
        runner = make_runner(make_model("llama").half(), 64)
        lora = read_lora(home / "llama" / "one")
        runner.adapters.load("fine", lora)
        with pytest.raises(LoraError, match="are no numbers"):
            runner.adapters.load("huge", replace(lora, scale=1e6))
