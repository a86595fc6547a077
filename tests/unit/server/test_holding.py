"""Models that another process holds over the control socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.contract.report import ModelReport, ServerReport, State
from llmserve.errors import ModelNotReadyError, NotLoadedError, ServerError
from llmserve.repository.repository import Model
from llmserve.server import Holds, OnDemand, ServerSettings
from llmserve.server.keep import holding
from llmserve.server.keep.control import listening
from llmserve.server.keep.demand import Demand
from llmserve.server.keep.supervisor import Supervisor


class Models:
    """What is loaded at once, unless it is broken."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.history: list[str] = []
        self.unreadable: set[str] = set()

    def is_loaded(self, name: str) -> bool:
        return name in self.loaded

    def cost_restart(self, name: str) -> bool:
        del name
        return False

    def why_it_failed(self, name: str) -> str:
        del name
        return ""

    def size(self, name: str) -> float:
        del name
        return 1.0

    def task(self, name: str) -> str:
        return f"task of {name}"

    async def check(self, name: str) -> None:
        if name in self.unreadable:
            raise ServerError("it cannot be read")

    def is_paused(self) -> bool:
        return False

    async def load(self, name: str) -> None:
        if name == "broken":
            raise ServerError("no weights")
        self.loaded.add(name)
        self.history.append(f"+{name}")

    async def unload(self, name: str) -> None:
        self.loaded.remove(name)
        self.history.append(f"-{name}")


@asynccontextmanager
async def serving(path: Path, models: Models | None) -> AsyncGenerator[Supervisor, None]:
    """The control socket of a supervisor that has no Triton."""
    supervisor = Supervisor([], [])
    if models is not None:
        names = ("a", "b", "broken")
        supervisor._demand = Demand(names, models, OnDemand(max_loaded=1))
        supervisor._loader = SimpleNamespace(  # type: ignore[assignment]
            task=models.task, check=models.check
        )
    async with listening(path, supervisor._answer, {"hold": supervisor._hold}):
        yield supervisor


def test_requests_that_overlap_share_a_hold_until_their_model_has_to_go(tmp_path: Path) -> None:
    async def go() -> None:
        models, path = Models(), tmp_path / "sock"
        holds, places = Holds(path), list[int]()
        async with serving(path, models):
            async with holds.hold("a"), holds.hold("a"):
                (shared,) = holds._shared.values()
                assert len(shared.listeners) == 2
                other = asyncio.ensure_future(used(holds, "b", places))
                while not shared.going:
                    await asyncio.sleep(0.001)
                late = asyncio.ensure_future(used(holds, "a", []))
                await asyncio.sleep(0.02)
                assert not late.done()
                assert models.history == ["+a"]
            await asyncio.gather(other, late)
            assert models.history == ["+a", "-a", "+b", "-b", "+a"]
            assert places == [1]
            assert not holds._shared

    asyncio.run(asyncio.wait_for(go(), 20))


async def used(holds: Holds, name: str, places: list[int]) -> None:
    async with holds.hold(name, on_place=places.append):
        pass


def test_why_a_model_cannot_be_held_arrives_as_the_same_error(tmp_path: Path) -> None:
    async def go() -> None:
        path = tmp_path / "sock"
        holds = Holds(path)
        with pytest.raises(NotLoadedError, match="no `llmserve serve` answers"):
            await used(holds, "a", [])
        async with serving(path, Models()):
            with pytest.raises(NotLoadedError, match=r"\(no weights\)") as failed:
                await used(holds, "broken", [])
            assert failed.value.details == {"retry_after": 6}
            with pytest.raises(ModelNotReadyError, match="there is no model 'c'"):
                await used(holds, "c", [])
            with pytest.raises(NotLoadedError, match="'a' is not loaded"):
                async with holds.hold("a", load=False):
                    pass
            async with holds.hold("a"), holds.hold("a", load=False):
                pass
        async with serving(path, None):
            with pytest.raises(ModelNotReadyError, match="has all of its models loaded"):
                await used(holds, "a", [])

    asyncio.run(asyncio.wait_for(go(), 20))


def is_waited_for(supervisor: Supervisor, name: str) -> bool:
    assert supervisor._demand is not None
    report = supervisor._demand.report(name)
    return report is not None and report.waited_for


def test_who_leaves_while_it_waits_is_forgotten(tmp_path: Path) -> None:
    async def go() -> None:
        models, path = Models(), tmp_path / "sock"
        holds = Holds(path)
        async with serving(path, models) as supervisor:
            assert supervisor._demand is not None
            async with holds.hold("a"):
                waiting = asyncio.ensure_future(used(holds, "b", []))
                while not is_waited_for(supervisor, "b"):
                    await asyncio.sleep(0.001)
                waiting.cancel()
                while is_waited_for(supervisor, "b"):
                    await asyncio.sleep(0.001)
            await used(holds, "a", [])
            assert models.history == ["+a"]

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_serve_that_is_about_to_hold_models_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "_NOT_YET", 0.01)

    async def not_yet(_: Mapping[str, Any]) -> ServerReport:
        raise ServerError("the server is still loading")

    async def go() -> None:
        path = tmp_path / "sock"
        async with listening(path, not_yet):
            waiting = asyncio.ensure_future(used(Holds(path), "a", []))
            await asyncio.sleep(0.03)
            assert not waiting.done()
            async with serving(path, Models()):
                await waiting

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_part_is_not_offered_beside_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "graph"):
        (tmp_path / "repo" / name).mkdir(parents=True)
    monkeypatch.setattr(Model, "part_of", "a")

    async def go() -> None:
        async with serving(tmp_path / "sock", Models()) as supervisor:
            supervisor.settings = [ServerSettings(tmp_path / "repo")]
            demand = supervisor._demand
            assert demand is not None
            for do in ("load", "reload", "unload"):
                with pytest.raises(ServerError, match=f"graph is a part of a: {do} a"):
                    await supervisor._change_on_demand(demand, do, "graph")
            assert "graph" not in demand.offered

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_user_loads_and_unloads_over_the_same_socket(tmp_path: Path) -> None:
    async def go() -> None:
        models = Models()
        async with serving(tmp_path / "sock", models) as supervisor:
            demand = supervisor._demand
            assert demand is not None
            for do in ("load", "reload", "unload"):
                await supervisor._change_on_demand(demand, do, "a")
            assert models.history == ["+a", "-a", "+a", "-a"]
            await supervisor._change_on_demand(demand, "load", "a")
            models.unreadable = {"a"}
            with pytest.raises(ServerError, match="it cannot be read"):
                await supervisor._change_on_demand(demand, "reload", "a")
            assert models.loaded == {"a"}, "the old one still answers"
            await supervisor._change_on_demand(demand, "unload", "a")
            report = supervisor._with_demand(ModelReport("a", State.UNLOADED)).demand
            assert report is not None
            assert (report.loaded, report.task) == (False, "task of a")
            part = ModelReport("part", State.READY)
            assert supervisor._with_demand(part) == part

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_model_is_withdrawn_once_its_folder_is_gone_for_longer_than_a_build_takes(
    tmp_path: Path,
) -> None:
    async def go() -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        async with serving(tmp_path / "sock", Models()) as supervisor:
            demand = supervisor._demand
            assert demand is not None
            kept = SimpleNamespace(folder=tmp_path.joinpath, models={"a": None, "broken": None})
            supervisor._keepers = [SimpleNamespace(kept=kept)]  # type: ignore[list-item]
            (tmp_path / "a").rmdir()
            supervisor._withdraw_gone(demand, 10.0)
            assert demand.offered == ["a", "b", "broken"], "a build may be about to replace them"
            (tmp_path / "a").mkdir()
            supervisor._withdraw_gone(demand, 11.0)
            (tmp_path / "a").rmdir()
            supervisor._withdraw_gone(demand, 12.5)
            supervisor._withdraw_gone(demand, 12.6)
            assert demand.offered == ["a", "b"]
            supervisor._withdraw_gone(demand, 15.0)
            assert demand.offered == ["b"]
            assert kept.models == {}

    asyncio.run(asyncio.wait_for(go(), 20))
