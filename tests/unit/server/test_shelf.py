"""Models of one Triton that are taken up and put away, with a Triton that does what it is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.contract.report import State
from llmserve.errors import ServerError
from llmserve.repository.repository import Repository
from llmserve.server import ServerSettings
from llmserve.server.keep import orders, shelf, work
from llmserve.server.keep.kept import Kept
from llmserve.server.keep.loader import ReplicaLoader
from llmserve.server.keep.orders import Orders
from llmserve.server.keep.reload import Reloader
from llmserve.server.keep.shelf import Shelf
from llmserve.server.settings import Ports

LOADED = "I1125 15:45:27.9 24669 m.cc:472] \"successfully loaded '{}'\"\n"
FAILED = "E1125 15:45:27.9 24669 m.cc:472] \"failed to load '{}' version 1: Internal: {}\"\n"


class Stubs:
    """The processes of models; each has used some time of a processor."""

    def __init__(self) -> None:
        self.processes: dict[str, list[int]] = {}
        self.used: dict[str, float] = {}
        self.killed: list[str] = []

    def of(self, model: str) -> list[int]:
        return self.processes.get(model, [])

    def seconds(self, model: str) -> float:
        return self.used.get(model, 0.0)

    def memory(self, model: str) -> tuple[int, int]:
        return (100, 150) if self.of(model) else (0, 0)

    def kill(self, model: str) -> None:
        self.killed.append(model)
        self.processes.pop(model, None)


class Triton:
    """It loads and unloads at once."""

    renewable = True
    grpc_url, http_url, runtime = "127.0.0.1:1", "http://127.0.0.1:2", "Triton"

    def __init__(self, log_file: Path, stubs: Stubs) -> None:
        self.log_file, self.stubs = log_file, stubs
        self.failures: dict[str, str] = {}
        self.ports = Ports("127.0.0.1", 1, 2, 3)
        self.process = SimpleNamespace(why_it_ended=lambda: "killed by SIGKILL")
        self.ready: set[str] = set()
        self.broken: dict[str, str] = {}
        self.dropped: list[str] = []
        self.lingers = False
        self.counts: dict[str, int] = {}
        self.given_up: list[str] = []
        self.dies = self.stalls = self.mends = False
        self.disk_is_full = False
        self.is_noticed = True
        """Whether the check that looks into the log comes before whoever waits."""
        self.kept: Kept

    def models(self) -> dict[str, str]:
        return dict.fromkeys(self.ready, "READY")

    def takes_requests(self, name: str) -> bool:
        return name in self.ready

    def answers(self) -> dict[str, int]:
        if self.dies:
            raise ServerError("the server does not answer")
        return dict(self.counts)

    def renew(self, name: str) -> None:
        if self.dies:
            self.kept.lost(time.monotonic(), "Triton ended")
            return
        if self.disk_is_full:
            raise OSError(28, "No space left on device")
        if self.stalls:
            return
        with self.log_file.open("a") as log:
            why = self.broken.get(name)
            log.write(FAILED.format(name, why) if why else LOADED.format(name))
        self.kept.log.read()
        model = self.kept.models[name]
        if not why:
            self.ready.add(name)
            if name not in self.counts:
                self.stubs.processes[name] = [1]
        if not self.is_noticed:
            return
        if self.mends:
            self.broken = {}
        if why:
            model.failed(1.0, f"it failed to load: {why}")
        else:
            model.loaded(1.0)

    def drop(self, name: str) -> None:
        self.dropped.append(name)
        self.ready.discard(name)
        if not self.lingers:
            self.stubs.processes.pop(name, None)

    def give_up(self, name: str, *, loaded_before: bool) -> None:
        self.given_up.append(name)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (orders, "CHECK_INTERVAL", 0.005), (shelf, "CHECK_INTERVAL", 0.005),
        (shelf, "_IDLE_SECONDS", 0.02), (work, "_LINGERS", 0.1), (work, "_LINGERS_UNSEEN", 0.3),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)

    async def accept(*_: object) -> None:
        pass

    monkeypatch.setattr(Orders, "_check_files", accept)


class One:
    """A Triton whose models are taken up and put away: b and c are ensembles with a part p."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "log").touch()
        for name in "abcpq":
            (folder / "repo" / name).mkdir(parents=True)
        self.parts: dict[str, tuple[str, ...]] = {"b": ("p", "q"), "c": ("p",)}
        monkeypatch.setattr(Repository, "parts_of", lambda _, name: self.parts.get(name, ()))
        self.stubs = Stubs()
        self.triton = Triton(folder / "log", self.stubs)
        self.lines: list[str] = []
        settings = ServerSettings(folder / "repo", renewable=True, on_demand=True, empty=True)
        triton: Any = self.triton
        self.kept = self.triton.kept = Kept(settings, triton, self.lines.append)
        self.canaries: list[bool] = []
        reloader = Reloader(self.kept)
        self.orders = Orders(self.kept, reloader)
        self.shelf = Shelf(
            self.kept, self.orders, reloader,
            lambda _: bool(self.canaries and self.canaries.pop()),
        )  # fmt: skip
        for name in "abc":
            self.shelf.offer(name)

    async def load_with_graph(self) -> None:
        """Load b, whose part q Triton itself runs."""
        self.triton.counts["q"] = 5
        (self.kept.folder("q") / "config.pbtxt").write_text('backend: "onnxruntime"')
        await self.shelf.load("b")

    def states(self) -> dict[str, str]:
        return {name: model.state.value for name, model in self.kept.models.items()}


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> One:
    return One(tmp_path, monkeypatch)


def go(scenario: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_a_model_is_loaded_and_put_away_with_the_parts_that_no_other_has(one: One) -> None:
    async def scenario() -> None:
        assert one.states() == dict.fromkeys("abc", "unloaded")
        await one.shelf.load("b")
        await one.shelf.load("c")
        assert one.triton.ready == {"b", "c", "p", "q"}
        await one.shelf.put_away("b")
        assert one.triton.dropped == ["b", "q"], "the model before its parts"
        assert one.states() == {"a": "unloaded", "b": "unloaded", "c": "ready", "p": "ready"}
        assert one.lines[-1] == "b: unloaded"
        assert not one.kept.failed, "nothing has failed, if nothing is loaded"

    go(scenario())


def test_a_model_that_fails_leaves_nothing_behind(one: One) -> None:
    async def scenario() -> None:
        one.triton.broken = {"b": "no weights"}
        with pytest.raises(ServerError, match="no weights"):
            await one.shelf.load("b")
        assert one.triton.dropped == ["p", "q"]
        assert one.states() == {"a": "unloaded", "b": "failed", "c": "unloaded"}
        assert not one.kept.failed, "others can be loaded"
        one.triton.broken = {}
        await one.shelf.load("b")
        assert one.states()["b"] == "ready"

    go(scenario())


def test_a_model_whose_files_find_no_place_is_not_loaded(one: One) -> None:
    async def scenario() -> None:
        one.triton.disk_is_full = True
        with pytest.raises(OSError, match="No space left"):
            await one.shelf.load("a")
        assert one.states()["a"] == "failed"
        assert one.kept.models["a"].why == "OSError: [Errno 28] No space left on device"
        one.triton.disk_is_full = False
        await one.shelf.load("a")
        assert one.states()["a"] == "ready"

    go(scenario())


def test_a_model_whose_process_did_not_respond_is_loaded_again(one: One) -> None:
    async def scenario() -> None:
        one.triton.broken = {"a": "Stub process 'a_0_0' is not healthy."}
        one.triton.mends = True
        await one.shelf.load("a")
        assert one.states()["a"] == "ready"
        assert "a: is loaded again, since it did not respond" in one.lines
        one.triton.broken = {"c": "Stub process 'c_0_0' is not healthy."}
        one.triton.mends = False
        with pytest.raises(ServerError, match="did not respond for a second"):
            await one.shelf.load("c")
        assert one.lines.count("c: is loaded again, since it did not respond") == 2

    go(scenario())


def test_what_is_read_in_the_log_before_a_check_is_not_missed(one: One) -> None:
    """Whoever loads another model reads it as well."""

    async def scenario() -> None:
        one.triton.is_noticed = False
        one.triton.broken = {"a": "no weights"}
        with pytest.raises(ServerError, match="no weights"):
            await one.shelf.load("a")
        assert one.triton.given_up == ["a"], "or Triton would try it again and again"
        assert one.states()["a"] == "failed"
        loading = asyncio.ensure_future(one.shelf.load("c"))
        await asyncio.sleep(0.05)
        assert not loading.done(), "it takes no requests, as far as is known"
        one.kept.models["c"].loaded(2.0)
        await loading

    go(scenario())


def test_what_a_model_that_failed_leaves_is_waited_for(one: One) -> None:
    async def scenario() -> None:
        one.triton.broken = {"a": "no weights"}
        one.stubs.processes["a"] = [1]
        loading = asyncio.ensure_future(one.shelf.load("a"))
        await asyncio.sleep(0.05)
        assert not loading.done(), "its process still takes memory"
        one.stubs.processes.pop("a")
        with pytest.raises(ServerError, match="no weights"):
            await loading

    go(scenario())


def test_a_model_is_unloaded_once_it_computes_nothing_and_has_no_canary(one: One) -> None:
    async def scenario() -> None:
        await one.shelf.load("a")
        one.stubs.used["a"] = 0.0
        one.canaries = [True, True]
        unloading = asyncio.ensure_future(one.shelf.put_away("a"))
        for _ in range(10):
            one.stubs.used["a"] += 1.0
            await asyncio.sleep(0.01)
            assert one.triton.dropped == []
        assert one.states()["a"] == "unloaded", "it gets no canaries from the beginning"
        await unloading
        assert one.triton.dropped == ["a"]
        assert one.canaries == []

    go(scenario())


def test_processes_that_triton_forgets_are_ended_unless_they_work(one: One) -> None:
    async def scenario() -> None:
        await one.shelf.load("a")
        one.triton.lingers = True
        unloading = asyncio.ensure_future(one.shelf.put_away("a"))
        for _ in range(20):
            one.stubs.used["a"] = one.stubs.used.get("a", 0.0) + 1.0
            await asyncio.sleep(0.01)
        assert one.stubs.killed == []
        await unloading
        assert one.stubs.killed == ["a"]
        assert "its processes are ended" in one.lines[-1]

    go(scenario())


@pytest.mark.parametrize("on_demand", [True, False])
def test_a_model_that_calls_its_parts_has_them_until_its_process_ends(
    one: One, on_demand: bool
) -> None:
    """It answers its last request until then."""

    async def scenario() -> None:
        await one.load_with_graph()
        one.triton.lingers = True
        unload = one.shelf.put_away if on_demand else one.orders.unload
        unloading = asyncio.ensure_future(unload("b"))
        for _ in range(20):
            one.stubs.used["b"] = one.stubs.used.get("b", 0.0) + 0.0001
            await asyncio.sleep(0.01)
        assert one.triton.dropped == ["b"]
        assert one.lines[-1] != "b: unloaded"
        one.stubs.processes.pop("b")
        one.triton.lingers = False
        await unloading
        assert one.triton.dropped == ["b", "p", "q"]
        assert one.lines[-1] == "b: unloaded"
        assert one.stubs.killed == []

    go(scenario())


def test_parts_that_a_model_that_was_built_anew_has_no_more_are_unloaded(one: One) -> None:
    async def scenario() -> None:
        await one.orders.reload("b")
        await one.orders.reload("c")
        one.parts = {"c": ("p",)}
        one.stubs.processes["b"] = [7]
        renew = one.triton.renew

        def renew_beside(name: str) -> None:
            renew(name)
            one.stubs.processes[name] = [7, 8]

        one.triton.renew = renew_beside  # type: ignore[method-assign]
        reloading = asyncio.ensure_future(one.orders.reload("b"))
        await asyncio.sleep(0.1)
        assert not reloading.done(), "the old process may still answer"
        assert one.triton.dropped == []
        one.stubs.processes["b"] = [8]
        await reloading
        assert one.triton.dropped == ["q"], "another has p as well"
        assert one.triton.ready == {"b", "c", "p"}
        assert "q" not in one.states()

    go(scenario())


def test_parts_of_an_earlier_build_go_when_a_later_one_loads_or_with_the_model(one: One) -> None:
    async def scenario() -> None:
        for leave in (one.orders.reload, one.orders.unload):
            one.parts, one.triton.broken = {"b": ("p", "q")}, {}
            await one.orders.reload("b")
            one.parts, one.triton.broken = {}, {"b": "no weights"}
            with pytest.raises(ServerError, match="no weights"):
                await one.orders.reload("b")
            assert one.triton.dropped == [], "the model before, if any, still answers"
            one.triton.broken = {}
            one.stubs.processes.clear()
            await leave("b")
            assert {*one.triton.dropped} - {"b"} == {"p", "q"}
            assert not {"p", "q"} & {*one.states()}
            one.triton.dropped.clear()

    go(scenario())


def test_what_triton_itself_computes_is_seen_by_its_answers(one: One) -> None:
    async def scenario() -> None:
        await one.load_with_graph()
        unloading = asyncio.ensure_future(one.shelf.put_away("b"))
        for _ in range(10):
            one.triton.counts["q"] += 1
            await asyncio.sleep(0.01)
            assert one.triton.dropped == [], "no process has computed anything"
        one.triton.counts["another"] = 1
        await unloading
        assert one.triton.dropped == ["b", "p", "q"]

    go(scenario())


def test_a_process_that_waits_for_what_triton_computes_is_ended_later(one: One) -> None:
    async def scenario() -> None:
        await one.load_with_graph()
        one.triton.lingers = True
        began = time.monotonic()
        await one.shelf.put_away("b")
        assert one.stubs.killed[0] == "b"
        assert time.monotonic() - began > 0.3
        # A Triton that has ended counts nothing.
        one.triton.dies = True
        assert await work.Work(one.kept, ["q"]).done() == work.Done(0.0, ())

    go(scenario())


def test_no_process_of_a_triton_that_has_ended_is_waited_for_or_killed(one: One) -> None:
    async def scenario() -> None:
        await one.shelf.load("a")
        one.triton.lingers = True
        going = asyncio.ensure_future(one.shelf.put_away("a"))
        while one.lines[-1] != "a: unloaded":
            await asyncio.sleep(0.005)
        one.kept.lost(time.monotonic(), "Triton ended")
        await going
        # Their numbers may be those of others by now.
        assert one.stubs.killed == []

    go(scenario())


def test_a_load_goes_on_in_the_triton_that_replaces_one(one: One) -> None:
    async def scenario() -> None:
        one.triton.dies = True
        loading = asyncio.ensure_future(one.shelf.load("a"))
        await asyncio.sleep(0.02)
        assert not loading.done()
        assert one.states()["a"] == "restarting", "the next Triton loads it"
        one.triton.ready = {"a"}
        one.kept.models["a"].loaded(2.0)
        one.kept.triton.loaded(2.0)
        await loading
        # What is unloaded stays so.
        one.kept.lost(3.0, "Triton ended")
        assert one.states() == {"a": "restarting", "b": "unloaded", "c": "unloaded"}
        waiting = asyncio.ensure_future(one.shelf.load("b"))
        one.kept.triton.failed(4.0, "it ends too often")
        with pytest.raises(ServerError, match="Triton has ended"):
            await waiting

    go(scenario())


def test_a_model_that_takes_too_long_is_given_up_and_triton_restarted_without_it(one: One) -> None:
    async def scenario() -> None:
        one.kept.settings = replace(one.kept.settings, ready_timeout=0.05)
        one.triton.stalls = True
        loading = asyncio.ensure_future(one.shelf.load("a"))
        with pytest.raises(ServerError, match=r"it was not loaded within 0.05 s"):
            await loading
        assert one.states()["a"] == "failed"
        keeper: Any = SimpleNamespace(kept=one.kept)
        loader = ReplicaLoader([keeper])
        assert loader.is_paused()
        loader.restart(time.monotonic(), in_use=True)
        assert one.kept.triton.alive, "the others answer first"
        loader.restart(time.monotonic() + 100, in_use=True)
        assert not one.kept.triton.alive, "but not for ever"
        assert loader.is_paused()
        one.kept.triton.loaded(2.0)
        assert not loader.is_paused()
        assert one.states()["b"] == "unloaded"

    go(scenario())


def test_the_size_of_a_model_is_measured_or_expected(one: One) -> None:
    async def scenario() -> None:
        keeper: Any = SimpleNamespace(
            kept=one.kept, offer=one.shelf.offer, load=one.shelf.load, put_away=one.shelf.put_away
        )
        loader = ReplicaLoader([keeper, keeper])
        assert loader.size("a") == 0.0, "its configuration cannot be read"
        assert not loader.is_loaded("a")
        await one.shelf.load("a")
        loader.measure()
        assert loader.is_loaded("a")
        assert loader.size("a") == 200.0
        await loader.unload("a")
        assert loader.size("a") == 300.0, "the most that it took"
        assert loader.task("a") == "generate", "nothing is known of it"
        (one.kept.folder("a") / "config.pbtxt").write_text(
            'parameters { key: "llmserve.task" value { string_value: "embed" } }\n'
            'input { name: "text_input" }'
        )
        assert ReplicaLoader([keeper]).task("a") == "embed"
        (one.kept.folder("a") / "config.pbtxt").write_text('input { name: "IN" }')
        assert ReplicaLoader([keeper]).task("a") == ""
        one.kept.models["a"].failed(1.0, "no weights")
        assert loader.why_it_failed("a") == "no weights"

    go(scenario())


def test_a_model_that_fails_in_one_replica_is_loaded_in_none(
    one: One, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    other = One(tmp_path / "other", monkeypatch)
    other.triton.broken = {"a": "no weights"}

    async def scenario() -> None:
        keepers: list[Any] = [
            SimpleNamespace(kept=o.kept, offer=o.shelf.offer, load=o.shelf.load,
                            put_away=o.shelf.put_away)
            for o in (one, other)
        ]  # fmt: skip
        loader = ReplicaLoader(keepers)
        with pytest.raises(ServerError, match="no weights"):
            await loader.load("a")
        assert one.triton.dropped == ["a"]
        assert not loader.is_loaded("a")
        other.triton.broken = {}
        await loader.load("a")
        assert one.states()["a"] == other.states()["a"] == State.READY.value

    go(scenario())
