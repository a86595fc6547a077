"""The conformance suite of recipes, on a real Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.testing import RecipeConformance


class TestOpenVino(RecipeConformance):
    """The suite with a model that is already converted, which saves a conversion per build."""

    recipe = "openvino"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _converted(cls, converted: Path) -> None:
        cls.model = str(converted)
