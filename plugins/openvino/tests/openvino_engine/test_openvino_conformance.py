"""The plugin held to what every recipe promises, on a real Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.testing import RecipeConformance


class OnConverted(RecipeConformance):
    """The suite on a model that is converted already, which saves a conversion for each build."""

    __test__ = False
    recipe = "openvino"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _converted(cls, converted: Path) -> None:
        cls.model = str(converted)


class TestOpenVino(OnConverted):
    __test__ = True


class TestOpenVinoInWholeBatches(OnConverted):
    __test__ = True
    # As the live tests build it, so that both have the same model.
    options = {"batching": "dynamic", "tokenizer": "tokenizers"}
