"""Runs the conformance suite for recipes, on the embedded server's stand-in."""

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
    # The same build as in the live tests, so that both use one model.
    options: ClassVar[dict[str, Any]] = {
        "engine": str(ENGINE),
        "bls_instance_count": 2,
        "tokenizer": "tokenizers",
    }
