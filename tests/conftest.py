"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _processes_can_be_interrupted() -> Iterator[None]:
    """A shell starts background jobs deaf to Ctrl-C, and what they start would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
