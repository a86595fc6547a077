"""Models that another process holds over the control socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.contract.report import ServerReport
from llmserve.errors import ModelNotReadyError, NotLoadedError, ServerError
from llmserve.server import Holds, OnDemand
from llmserve.server.keep import remote_holds
from llmserve.server.keep.control import listening
from llmserve.server.keep.supervisor import Socket
from tests.unit.server.offered import Offered


class Models:
    """What is loaded at once, unless it is broken."""

    is_paused = False

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.history: list[str] = []

    def cost_restart(self, name: str) -> bool:
        del name
        return False

    def why_it_failed(self, name: str) -> str:
        del name
        return ""

    def size(self, name: str) -> float:
        del name
        return 1.0

    async def load(self, name: str) -> None:
        if name == "broken":
            raise ServerError("no weights")
        self.loaded.add(name)
        self.history.append(f"+{name}")

    async def unload(self, name: str) -> None:
        self.loaded.remove(name)
        self.history.append(f"-{name}")


@asynccontextmanager
async def serving(path: Path, models: Models | None) -> AsyncGenerator[Offered | None, None]:
    """The control socket of a `serve` that has no Triton."""
    offered = None
    if models is not None:
        offered = Offered(("a", "b", "broken"), models, OnDemand(max_loaded=1))
    supervisor: Any = SimpleNamespace()
    reconciler: Any = offered or SimpleNamespace(is_on_demand=False)
    socket = Socket(supervisor, reconciler)
    async with listening(path, socket.answer, {"hold": socket.hold}):
        yield offered


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
            with pytest.raises(ModelNotReadyError):
                await used(holds, "c", [])
            with pytest.raises(NotLoadedError):
                async with holds.hold("a", load=False):
                    pass
            async with holds.hold("a"), holds.hold("a", load=False):
                pass
        async with serving(path, None):
            with pytest.raises(ModelNotReadyError):
                await used(holds, "a", [])

    asyncio.run(asyncio.wait_for(go(), 20))


def is_waited_for(offered: Offered | None, name: str) -> bool:
    report = offered and offered.report(name)
    return bool(report and report.waited_for)


def test_who_leaves_while_it_waits_is_forgotten(tmp_path: Path) -> None:
    async def go() -> None:
        models, path = Models(), tmp_path / "sock"
        holds = Holds(path)
        async with serving(path, models) as offered:
            async with holds.hold("a"):
                waiting = asyncio.ensure_future(used(holds, "b", []))
                while not is_waited_for(offered, "b"):
                    await asyncio.sleep(0.001)
                waiting.cancel()
                while is_waited_for(offered, "b"):
                    await asyncio.sleep(0.001)
            await used(holds, "a", [])
            assert models.history == ["+a"]

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_serve_that_is_about_to_hold_models_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_holds, "_NOT_YET", 0.01)

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


def test_a_class_above_asks_anew_for_a_model_that_others_wait_for(tmp_path: Path) -> None:
    async def go() -> None:
        models, path = Models(), tmp_path / "sock"
        holds = Holds(path)

        async def waits(priority: int) -> None:
            async with holds.hold("b", priority=priority):
                pass

        async with serving(path, models) as offered:
            assert offered is not None
            async with holds.hold("a"):
                asked = [asyncio.ensure_future(waits(priority)) for priority in (3, 5, -1, 0)]
                while len(offered.desired.holds) < 3:
                    await asyncio.sleep(0.001)
                # Who is below shares the hold of who is above.
                assert sorted(each.priority for each in offered.desired.holds) == [-1, 0, 3]
            await asyncio.gather(*asked)
            assert models.history[:3] == ["+a", "-a", "+b"]
            assert not holds._shared

    asyncio.run(asyncio.wait_for(go(), 20))
