"""Fixtures of what keeps responses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .keeping import Keeping
from .postgresql import Postgresql, missing, running_postgresql


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Postgresql]:
    """Debian's PostgreSQL; a machine without it skips these tests, and ``.ci/run`` ends."""
    if lack := missing():
        pytest.skip(lack)
    with running_postgresql() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def kept(request: Any, tmp_path: Path) -> Keeping:
    if request.param == "sqlite":
        return Keeping(tmp_path)
    server: Postgresql = request.getfixturevalue("postgresql")
    return Keeping(tmp_path, server.new_database())
