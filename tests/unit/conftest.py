"""Fixtures for tests of clients, which talk to a scripted Triton in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmserve.testing import ScriptedTriton


@pytest.fixture
def scripted() -> ScriptedTriton:
    models = {"m": "stream", "other": "unary"}
    return ScriptedTriton(pieces=["cut ", "off"], index=False, models=models)


@pytest.fixture
def url(scripted: ScriptedTriton) -> Iterator[str]:
    with scripted.serving() as url:
        yield url
