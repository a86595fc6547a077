"""The conformance suite on vLLM itself, which only `make test-vllm` installs."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest

from llmserve.testing import ConstrainedConformance, RecipeConformance

pytest.importorskip("vllm", reason="only `make test-vllm` installs vLLM")
# Without these, each load compiles for half a minute.
QUICK: dict[str, Any] = {"enforce_eager": True, "dtype": "float32"}


class TestVllm(RecipeConformance):
    recipe = "vllm"
    options: ClassVar[dict[str, Any]] = QUICK


class TestConstrained(ConstrainedConformance):
    """What is batched with what changes nothing of a constrained answer either."""

    recipe = "vllm"
    options: ClassVar[dict[str, Any]] = {**QUICK, "batching": "static"}
    constrained: ClassVar[dict[str, Any]] = {"regex": "(red|green) [0-9]{2}"}

    def fits(self, text: str) -> bool:
        return re.fullmatch("(red|green) [0-9]{2}", text) is not None


class TestDynamic(RecipeConformance):
    recipe = "vllm"
    options: ClassVar[dict[str, Any]] = {**QUICK, "batching": "dynamic", "decoupled": True}
