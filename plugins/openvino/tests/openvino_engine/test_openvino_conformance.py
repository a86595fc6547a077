"""The conformance suite of recipes, on a real Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.testing import RecipeConformance


class ConvertedModel(RecipeConformance):
    """The suite with a model that is already converted, which saves a conversion per build."""

    __test__ = False
    recipe = "openvino"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _converted(cls, converted: Path) -> None:
        cls.model = str(converted)


class TestOpenVino(ConvertedModel):
    __test__ = True


class TestOpenVinoInWholeBatches(ConvertedModel):
    __test__ = True
    # The same options as in the live tests, so that both use the same model.
    options = {"batching": "dynamic", "tokenizer": "tokenizers"}
