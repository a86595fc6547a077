"""How large models are taken to be that are built anew while they are served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.contract.report import State
from llmserve.repository.repository import Model
from llmserve.server.keep import loader as module
from llmserve.server.keep.loader import ReplicaLoader


class Keeper:
    """Loads at once; each model takes what ``memory`` says."""

    def __init__(self, repository: Path) -> None:
        self.memory: dict[str, int] = {}
        stubs = SimpleNamespace(
            memory=lambda name: (self.memory.get(name, 0),) * 2,
            of=lambda name: [1] if name in self.memory else [],
        )
        settings = SimpleNamespace(repository=repository)
        self.kept = SimpleNamespace(settings=settings, given_up=False, models={}, stubs=stubs)

    def offer(self, name: str) -> None:
        states = SimpleNamespace(name=name, state=State.UNLOADED, alive=False, parts=())
        self.kept.models.setdefault(name, states)

    async def load(self, name: str) -> None:
        self.kept.models[name].state, self.kept.models[name].alive = State.READY, True

    async def put_away(self, name: str) -> None:
        self.kept.models[name].state, self.kept.models[name].alive = State.UNLOADED, False


def built(repository: Path, name: str) -> None:
    """Replace a model's folder as a build does: both exist for a moment."""
    (repository / f".{name}").mkdir()
    if (repository / name).exists():
        (repository / name).rename(repository / f".old.{name}")
    (repository / f".{name}").rename(repository / name)
    if (repository / f".old.{name}").exists():
        (repository / f".old.{name}").rmdir()


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    sizes: dict[str, int] = {}
    monkeypatch.setattr(module, "expected_memory", lambda model: sizes.get(model.name, 0))
    return sizes


def test_a_model_that_was_built_smaller_is_not_taken_for_what_it_was(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    async def scenario() -> None:
        keeper: Any = Keeper(tmp_path)
        built(tmp_path, "a")
        loader = ReplicaLoader([keeper])
        sizes["a"] = 10
        assert loader.size("a") == 10
        built(tmp_path, "a")
        sizes["a"] = 3
        assert loader.size("a") == 3, "it was refused until now, and never loaded"
        keeper.memory["a"] = 12
        await loader.load("a")
        built(tmp_path, "a")
        loader.measure()
        assert loader.size("a") == 12, "the old one is still loaded"
        await loader.unload("a")
        assert loader.size("a") == 3
        keeper.memory["a"] = 4
        await loader.load("a")
        await loader.unload("a")
        assert loader.size("a") == 4, "the most that this build took"

    asyncio.run(scenario())


def test_the_parts_of_a_new_model_count(
    tmp_path: Path, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = property(lambda model: ("part",) if model.name == "whole" else ())
    monkeypatch.setattr(Model, "parts", parts)
    keeper: Any = Keeper(tmp_path)
    loader = ReplicaLoader([keeper])
    built(tmp_path, "part")
    built(tmp_path, "whole")
    sizes["part"] = 5
    assert loader.size("whole") == 5


def test_a_part_that_triton_itself_runs_counts_by_its_files(
    tmp_path: Path, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        keeper: Any = Keeper(tmp_path)
        for name, backend in (("m", "python"), ("graph", "onnxruntime")):
            built(tmp_path, name)
            (tmp_path / name / "config.pbtxt").write_text(f'backend: "{backend}"')
        loader = ReplicaLoader([keeper, keeper])
        keeper.offer("m")
        keeper.kept.models["m"].parts = ("graph",)
        sizes.update(m=1, graph=100)
        keeper.memory["m"] = 10
        await loader.load("m")
        assert loader.size("m") == 2 * 110
        sizes["graph"] = 300
        loader.measure()
        assert loader.size("m") == 2 * 110, "as it was when it was loaded"
        await loader.unload("m")
        assert loader.size("m") == 2 * 110
        await loader.load("m")
        keeper.memory["graph"] = 40
        loader.measure()
        assert loader.size("m") == 2 * 50, "a stand-in's process is measured"

    asyncio.run(scenario())
