"""The recipe held to what every recipe promises, on the stand-in of the embedded server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from llmserve.testing import RecipeConformance

ENGINE = Path(__file__).with_name("trtllm_builds") / "engines" / "1.2"


class TestEngine(RecipeConformance):
    recipe = "trtllm"
    options: ClassVar[dict[str, Any]] = {"engine": str(ENGINE), "decoupled": False}


class TestStreaming(RecipeConformance):
    recipe = "trtllm"
    # As the live tests build it, so that both have the same model.
    options: ClassVar[dict[str, Any]] = {
        "engine": str(ENGINE),
        "bls_instance_count": 2,
        "tokenizer": "tokenizers",
    }
