"""What is certified are models that generate text."""

from __future__ import annotations

from typing import Any

import pytest

from llmserve.certify.triton import TritonEndpoint
from llmserve.client import ModelInfo
from llmserve.errors import UsageError


class OfTask:
    """A client whose model is for a task."""

    def __init__(self, task: str) -> None:
        self._task = task

    def model(self, name: str) -> ModelInfo:
        return ModelInfo(name, "unary", True, None, {}, {}, task=self._task)


def test_a_model_that_answers_with_values_is_refused_in_one_sentence() -> None:
    client: Any = OfTask("embed")
    with pytest.raises(UsageError, match=r"^minilm computes embeddings, and what is certified"):
        TritonEndpoint(client, "minilm")
    client = OfTask("generate")
    assert TritonEndpoint(client, "demo").model == "demo"
