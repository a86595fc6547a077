"""The live server of the test kit keeps what tests ask for, and not everything at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.testing import LiveTriton, live


class Loads:
    """A server that notes what is loaded."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load(self, name: str) -> None:
        assert name not in self.loaded
        self.loaded.append(name)

    def unload(self, name: str) -> None:
        self.loaded.remove(name)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Build nothing; a recipe called ensemble has two parts."""
    names: list[str] = []

    def build(plugin: str, model: str, *, name: str, **asked: Any) -> Any:
        names.append(name)
        parts = [f"{name}_a", f"{name}_b"] if plugin == "ensemble" else []
        return SimpleNamespace(manifest=SimpleNamespace(parts=parts))

    monkeypatch.setattr(live, "build", build)
    monkeypatch.setattr(live, "_MOST_LOADED", 4)
    return names


def test_what_was_asked_for_longest_ago_makes_room_and_comes_back(
    built: list[str], tmp_path: Path
) -> None:
    server: Any = Loads()
    triton = LiveTriton(server, None, tmp_path)  # type: ignore[arg-type]
    assert triton.build("ensemble") == "ensemble-0"
    assert server.loaded == ["ensemble-0_a", "ensemble-0_b", "ensemble-0"]
    assert triton.build("hf") == "hf-1"
    assert triton.build("ensemble") == "ensemble-0"
    triton.build("hf", max_batch_size=2)
    assert server.loaded == ["ensemble-0_a", "ensemble-0_b", "ensemble-0", "hf-2"]
    assert triton.build("hf") == "hf-1"
    assert sorted(server.loaded) == ["hf-1", "hf-2"]
    triton.build("ensemble")
    assert built == ["ensemble-0", "hf-1", "hf-2"], "each once"
