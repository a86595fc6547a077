"""Test tools for plugin authors: a live, a scripted and a fake Triton, and a conformance suite.

In a plugin's ``pyproject.toml``::

    [tool.pytest.ini_options]
    addopts = "-p llmserve.testing"

and in one of its tests::

    from llmserve.testing import RecipeConformance

    class TestAcme(RecipeConformance):
        recipe = "acme"

This builds the recipe, serves it with a real Triton and checks that it keeps every promise of
recipes. The fixture ``triton`` serves other models that a test builds.

Runtime classes can be tested without Triton::

    driver = AcmeDriver({}, Path())
    driver.start(make_parts(AcmeGenerator({}, Path())))
    request = FakeRequest({"text_input": ["Hello"]}, max_tokens=4)
    driver.execute([request])
    assert request.text == "..."
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmserve.repository.config import read as read_config
from llmserve.testing.command import run
from llmserve.testing.conformance import ConstrainedConformance, RecipeConformance
from llmserve.testing.fake import (
    ByteTokenizer,
    FakeBackendUtils,
    FakeRequest,
    FakeResponse,
    FakeTensor,
    generation,
    make_parts,
)
from llmserve.testing.frontends import FrontendConformance
from llmserve.testing.live import LiveTriton
from llmserve.testing.scripted import ScriptedTriton
from llmserve.testing.values import ValueConformance

__all__ = [
    "ByteTokenizer",
    "ConstrainedConformance",
    "FakeBackendUtils",
    "FakeRequest",
    "FakeResponse",
    "FakeTensor",
    "FrontendConformance",
    "LiveTriton",
    "RecipeConformance",
    "ScriptedTriton",
    "ValueConformance",
    "generation",
    "make_parts",
    "read_config",
    "run",
    "triton",
]


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveTriton]:
    """One embedded Triton for the whole session; it loads the models that tests build."""
    with LiveTriton.start(tmp_path_factory.mktemp("triton") / "model_repository") as live:
        yield live
