"""How a run of all tests ends, which decides what ``make test`` does next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import conftest

FAILED, INTERRUPTED = pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (None, FAILED, FAILED),
        ("Not properly terminated", pytest.ExitCode.OK, 70),
        ("Not properly terminated", FAILED, 70),
        ("Not properly terminated", pytest.ExitCode.INTERNAL_ERROR, 70),
        ("Not properly terminated", INTERRUPTED, INTERRUPTED),
        ("keyboard-interrupt", INTERRUPTED, INTERRUPTED),
    ],
)
def test_a_run_whose_worker_died_is_told_from_one_that_failed_or_was_interrupted(
    error: str | None, before: int, after: int
) -> None:
    config = SimpleNamespace(stash=pytest.Stash())
    conftest.pytest_testnodedown(SimpleNamespace(config=config), error)
    session: Any = SimpleNamespace(config=config, exitstatus=before)
    conftest.pytest_sessionfinish(cast(pytest.Session, session))
    assert session.exitstatus == after
