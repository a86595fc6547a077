"""A Triton in this process, for the tests of who asks one."""

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
