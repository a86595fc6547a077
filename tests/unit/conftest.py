"""Fixtures for tests of clients, which talk to a scripted Triton in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.scripted import Scripted


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def url(scripted: Scripted) -> Iterator[str]:
    with scripted.serving() as url:
        yield url
