"""Whoever serves a repository that is served already is told."""

from __future__ import annotations

from pathlib import Path

from tests.live.servers import ECHO, Serving, repository


def test_a_repository_that_is_served_twice(tmp_path: Path) -> None:
    folder = repository(tmp_path / "models", echo=ECHO)
    first = Serving(str(folder), "--frontend", "none")
    try:
        second = Serving(str(folder), "--frontend", "none")
        try:
            assert f"note: process {first.process.pid} serves {folder} too, at {first.url}: " in (
                second.output
            )
            assert "too, at" not in first.output
        finally:
            second.close()
    finally:
        first.close()
