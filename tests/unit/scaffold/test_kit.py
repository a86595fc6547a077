"""The conformance suite: what it determines about a recipe before it tests it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from llmserve.errors import LLMServeError, RequestRejectedError, RequestTimeoutError
from llmserve.testing import RecipeConformance
from llmserve.testing.client import ScriptedClient


@pytest.mark.parametrize(
    ("answer", "skips"),
    [
        (RequestTimeoutError("no answer within 5 s"), True),
        (RequestRejectedError("over the model's context of 64"), False),
    ],
)
def test_the_end_of_a_context_is_tested_where_there_is_one(
    answer: LLMServeError, skips: bool
) -> None:
    client = ScriptedClient(error=answer)

    class Suite(RecipeConformance):
        recipe = "acme"
        _unlimited: ClassVar[dict[str, bool]] = {}

    live: Any = SimpleNamespace(client=client)
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception) if skips else nullcontext():
            Suite()._needs_context(live, "acme-0")
    assert len(client.requests) == 1, "a request takes seconds, so the suite sends it once"
    assert client.requests[0]["timeout"] < 10
