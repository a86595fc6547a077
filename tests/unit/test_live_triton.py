"""The live server of the test kit keeps what tests ask for, and not everything at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.repository.config import new_config, to_text
from llmserve.testing import LiveTriton, live


class Loads:
    """A server that notes what is loaded; an ensemble brings its steps, as with Triton."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()

    def load(self, name: str) -> None:
        brought = {name, f"{name}_a"} if name == "ensemble-0" else {name}
        assert not brought & self.loaded
        self.loaded |= brought

    def unload(self, name: str, *, timeout: float) -> None:
        self.loaded.remove(name)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Build configurations alone; a recipe called ensemble has two parts, and one is its step."""
    names: list[str] = []

    def build(plugin: str, model: str, *, name: str, output: Path, **asked: Any) -> Any:
        names.append(name)
        parts = [f"{name}_a", f"{name}_b"] if plugin == "ensemble" else []
        for one in (*parts, name):
            config = new_config(one, backend="x", max_batch_size=0)
            if one == name and parts:
                config.ensemble_scheduling.step.add(model_name=parts[0])
            (output / one).mkdir()
            (output / one / "config.pbtxt").write_text(to_text(config))
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
    assert server.loaded == {"ensemble-0_a", "ensemble-0_b", "ensemble-0"}
    assert triton.build("hf") == "hf-1"
    assert triton.build("ensemble") == "ensemble-0"
    triton.build("hf", max_batch_size=2)
    assert server.loaded == {"ensemble-0_a", "ensemble-0_b", "ensemble-0", "hf-2"}
    assert triton.build("hf") == "hf-1"
    assert server.loaded == {"hf-1", "hf-2"}
    triton.build("ensemble")
    assert built == ["ensemble-0", "hf-1", "hf-2"], "each once"
