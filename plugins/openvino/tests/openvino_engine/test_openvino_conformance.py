"""The conformance suite of recipes, on a real Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from llmserve.testing import RecipeConformance


class TestOpenVino(RecipeConformance):
    """The suite with a model that is already converted, which saves a conversion per build."""

    recipe = "openvino"
    constrained: ClassVar[dict[str, Any]] = {"choice": ["red", "green (light)"]}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _converted(cls, converted: Path) -> None:
        cls.model = str(converted)
