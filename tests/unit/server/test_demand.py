"""Which model is loaded next and which makes place, with models that take no time and no memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.contract.classes import LATE_AFTER
from llmserve.contract.report import OnDemandReport
from llmserve.errors import ModelNotReadyError, NotLoadedError, ServerError
from llmserve.server.keep.desired import Hold, OnDemand
from tests.unit.server.offered import Offered


class Models:
    """Loads models at once, or when the test says so, and checks that none at work is unloaded."""

    def __init__(self, **sizes: float) -> None:
        self.sizes = sizes
        self.loaded: set[str] = set()
        self.taking: set[str] = set()
        """What takes memory, also while it is loaded or unloaded."""
        self.most: tuple[int, float] = (0, 0.0)
        self.history: list[str] = []
        self.broken: set[str] = set()
        self.failed: dict[str, str] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.paused = False
        self.costly: set[str] = set()
        self.in_use: Callable[[str], int] = lambda _: 0

    def why_it_failed(self, name: str) -> str:
        return self.failed.get(name, "")

    def size(self, name: str) -> float:
        return self.sizes[name]

    def cost_restart(self, name: str) -> bool:
        return name in self.costly

    @property
    def is_paused(self) -> bool:
        return self.paused

    async def load(self, name: str) -> None:
        assert name not in self.taking
        self.taking.add(name)
        size = sum(self.sizes[each] for each in self.taking)
        self.most = (max(self.most[0], len(self.taking)), max(self.most[1], size))
        await self.gate.wait()
        await asyncio.sleep(0)
        if name in self.broken:
            self.taking.remove(name)
            raise ServerError("no weights")
        self.loaded.add(name)
        self.history.append(f"+{name}")

    async def unload(self, name: str) -> None:
        assert not self.in_use(name)
        self.loaded.remove(name)
        await asyncio.sleep(0)
        self.taking.remove(name)
        self.history.append(f"-{name}")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def settled() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def go(scenario: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def demand(models: Models, **settings: Any) -> tuple[Offered, Clock]:
    clock = Clock()
    return Offered(models.sizes, models, OnDemand(**settings), clock), clock


async def used(one: Offered, name: str) -> None:
    hold = one.hold(name)
    await hold.granted
    one.release(hold)


def report_of(one: Offered, name: str) -> OnDemandReport:
    report = one.report(name)
    assert report is not None
    return report


def test_the_least_recently_used_model_makes_place() -> None:
    async def scenario() -> None:
        models = Models(a=1, b=1, c=1)
        one, clock = demand(models, max_loaded=2)
        for name in "abac":
            clock.now += 1
            await used(one, name)
        assert models.history == ["+a", "+b", "-b", "+c"]

    go(scenario())


def test_a_model_that_is_held_is_unloaded_when_the_last_hold_ends() -> None:
    async def scenario() -> None:
        models = Models(a=1, b=1)
        one, _ = demand(models, max_loaded=1)
        first = one.hold("a")
        await first.granted
        wanted = one.hold("b")
        await settled()
        assert first.report() == {"held": True, "going": True}
        assert wanted.report() == {"place": 1}
        late = one.hold("a")
        await settled()
        assert late.report() == {"place": 2}, "what has to go gets no new requests"
        one.release(first)
        await wanted.granted
        assert models.history == ["+a", "-a", "+b"]
        one.release(wanted)
        await late.granted
        assert models.history[3:] == ["-b", "+a"]

    go(scenario())


def test_one_that_nobody_uses_goes_before_one_at_work() -> None:
    async def scenario() -> None:
        models = Models(a=1, b=1, c=1)
        one, clock = demand(models, max_loaded=2)
        at_work = one.hold("a")
        await at_work.granted
        clock.now += 1
        await used(one, "b")
        await used(one, "c")
        assert models.history == ["+a", "+b", "-b", "+c"]
        assert not at_work.going

    go(scenario())


def test_several_that_nobody_uses_go_at_once_and_only_one_at_work() -> None:
    async def scenario() -> None:
        models = Models(a=1, b=1, c=1, d=1)
        one, clock = demand(models, max_loaded=2)
        for name in "ab":
            await used(one, name)
        models.gate.clear()
        wanted = [one.hold("c"), one.hold("d")]
        await settled()
        assert models.history == ["+a", "+b", "-a", "-b"]
        assert models.taking == {"c", "d"}
        models.gate.set()
        for hold in wanted:
            await hold.granted
        later = [one.hold("a"), one.hold("b")]
        await settled()
        assert [hold.going for hold in wanted] == [True, False]
        clock.now += 1
        one.release(wanted[0])
        await later[0].granted
        assert [hold.going for hold in (wanted[1], later[0])] == [True, False]

    go(scenario())


def test_while_triton_is_to_be_restarted_nothing_begins() -> None:
    async def scenario() -> None:
        models = Models(a=1, b=1)
        one, _ = demand(models, max_loaded=1)
        first = one.hold("a")
        await first.granted
        models.paused = True
        one.check()
        assert first.going, "requests that come now wait"
        late, other = one.hold("a"), one.hold("b")
        await settled()
        assert one.demand.is_in_use
        one.release(first)
        assert not one.demand.is_in_use
        await settled()
        assert not late.granted.done()
        assert models.history == ["+a"]
        models.paused = False
        one.check()
        await late.granted
        one.release(late)
        await other.granted
        assert models.history == ["+a", "-a", "+b"]

    go(scenario())


def test_a_model_stays_if_who_waited_for_its_place_has_gone() -> None:
    async def scenario() -> None:
        models = Models(a=1, b=1)
        one, _ = demand(models, max_loaded=1)
        first = one.hold("a")
        await first.granted
        wanted = one.hold("b")
        late = one.hold("a")
        one.release(wanted)
        await late.granted
        assert not first.going
        assert models.history == ["+a"]

    go(scenario())


def test_a_pinned_model_never_makes_place() -> None:
    async def scenario() -> None:
        models = Models(a=1, b=1, c=1)
        models.loaded, models.taking = {"a"}, {"a"}
        one, clock = demand(models, max_loaded=2, pinned=("a",), unload_after=5)
        for name in "bcb":
            clock.now += 1
            await used(one, name)
        clock.now += 100
        one.check()
        await settled()
        assert models.history == ["+b", "-b", "+c", "-c", "+b", "-b"]
        full, _ = demand(models, max_loaded=1, pinned=("a",))
        with pytest.raises(NotLoadedError, match=r"the pinned models \(a\) leave no place"):
            await full.hold("b").granted

    go(scenario())


def test_who_uses_a_model_says_how_long_it_stays_without_any_use() -> None:
    async def scenario() -> None:
        models = Models(a=1, b=1)
        one, clock = demand(models, unload_after=5)

        async def use(name: str, keep: float | None) -> None:
            hold = one.hold(name, keep=keep)
            await hold.granted
            one.release(hold)

        async def after(seconds: float) -> str:
            clock.now += seconds
            one.check()
            await settled()
            return "".join(sorted(models.loaded))

        await use("a", 20)
        await use("b", -1)
        # It holds on when others say nothing of it.
        await use("a", None)
        assert await after(19) == "ab"
        assert await after(1) == "b"
        assert await after(1e6) == "b"
        await use("b", 0)
        assert await after(0) == ""
        # It is as it was when it is loaded again.
        await use("b", None)
        assert await after(4) == "b"
        assert await after(1) == ""
        # Nobody is kept from a model that has to make place.
        small, _ = demand(Models(a=1, b=1), max_loaded=1)
        hold = small.hold("a", keep=-1)
        await hold.granted
        small.release(hold)
        await used(small, "b")

    go(scenario())


def test_a_model_that_fails_to_load_fails_its_own_requests_only() -> None:
    async def scenario() -> None:
        models = Models(a=1, b=1)
        models.broken = {"a"}
        one, clock = demand(models, max_loaded=1)
        waiting = [one.hold("a"), one.hold("a"), one.hold("b")]
        await settled()
        with pytest.raises(
            NotLoadedError, match=r"'a' could not be loaded \(no weights\)"
        ) as failed:
            await waiting[0].granted
        assert failed.value.details == {"retry_after": 6}
        assert waiting[1].report()["code"] == "not_loaded"
        await waiting[2].granted
        assert report_of(one, "a").retry_after == 6
        with pytest.raises(NotLoadedError):
            await one.hold("a").granted
        assert report_of(one, "b").loaded
        one.release(waiting[2])
        # Each failure doubles the time until the next try, up to five minutes.
        waits = []
        for _ in range(9):
            clock.now += report_of(one, "a").retry_after or 0
            with pytest.raises(NotLoadedError) as failed:
                await one.hold("a").granted
            waits.append(failed.value.details["retry_after"] - 1)
        assert waits == [10, 20, 40, 80, 160, 300, 300, 300, 300]
        clock.now += 301
        models.broken = set()
        await one.load("a")
        assert replace(report_of(one, "a"), load_seconds=0) == OnDemandReport(
            loaded=True, size=1, load_seconds=0
        )

    go(scenario())


def test_a_model_that_costs_a_restart_of_triton_is_tried_again_later_than_others() -> None:
    async def scenario() -> None:
        models = Models(a=1)
        models.broken, models.costly = {"a"}, {"a"}
        one, clock = demand(models, max_loaded=1)
        waits = []
        for _ in range(8):
            with pytest.raises(NotLoadedError) as failed:
                await one.hold("a").granted
            waits.append(failed.value.details["retry_after"] - 1)
            with pytest.raises(NotLoadedError):
                await one.hold("a").granted
            clock.now += waits[-1] + 1
        assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]

    go(scenario())


def test_what_has_died_too_often_is_tried_again_after_a_while() -> None:
    async def scenario() -> None:
        models = Models(a=1)
        one, clock = demand(models, max_loaded=1)
        await used(one, "a")
        models.loaded, models.taking, models.failed = set(), set(), {"a": "its process has died"}
        one.check()
        with pytest.raises(NotLoadedError, match="its process has died"):
            await one.hold("a").granted
        clock.now += 6
        await used(one, "a")

    go(scenario())


def test_models_share_the_memory_that_there_is() -> None:
    async def scenario() -> None:
        models = Models(small=3, other=3, large=8, huge=11)
        one, clock = demand(models, memory=10)
        for name in ("small", "other", "large", "small"):
            clock.now += 1
            await used(one, name)
        assert models.history == ["+small", "+other", "-small", "-other", "+large", "-large",
                                  "+small"]  # fmt: skip
        with pytest.raises(NotLoadedError, match="it needs 0 MB of memory, and 0 MB are allowed"):
            await one.hold("huge").granted
        await used(one, "other")
        models.sizes["other"] = 8
        clock.now += 1
        one.check()
        await settled()
        assert models.history[-1] == "-small", "what grows takes the place of what is not used"

    go(scenario())


def test_what_is_not_used_is_unloaded_after_a_while() -> None:
    async def scenario() -> None:
        models = Models(a=1, b=1)
        one, clock = demand(models, unload_after=10)
        hold = one.hold("a")
        await used(one, "b")
        clock.now += 9
        one.check()
        clock.now += 1
        one.check()
        await settled()
        assert models.history == ["+a", "+b", "-b"]
        one.release(hold)
        clock.now += 10
        one.check()
        await settled()
        assert models.history[-1] == "-a"

    go(scenario())


def test_a_user_unloads_and_loads() -> None:
    async def scenario() -> None:
        models = Models(a=1)
        one, _ = demand(models, max_loaded=1)
        hold = one.hold("a")
        await hold.granted
        unloading = asyncio.ensure_future(one.unload("a"))
        await settled()
        late = one.hold("a")
        assert not unloading.done()
        one.release(hold)
        await unloading
        await late.granted
        assert models.history == ["+a", "-a", "+a"]
        one.release(late)
        await one.unload("a")
        await one.unload("a")
        assert models.history[3:] == ["-a"]
        with pytest.raises(ModelNotReadyError):
            await one.unload("aa")
        with pytest.raises(NotLoadedError):
            await one.hold("a", load=False).granted

    go(scenario())


@given(st.integers(), st.integers(1, 3), st.booleans())
def test_everyone_is_served_and_the_limit_is_kept(seed: int, limit: int, by_memory: bool) -> None:
    """Whatever the order of requests, failures, cancellations and orders of a user."""

    async def scenario() -> None:
        chance = random.Random(seed)
        models = Models(**dict.fromkeys("abcdef", 1.0))
        models.broken = {"f"}
        settings = {"memory": float(limit)} if by_memory else {"max_loaded": limit}
        one, clock = demand(models, **settings, unload_after=50)
        holds: set[Hold] = set()
        models.in_use = lambda name: sum(h.model == name and h.granted.done() for h in holds)
        outcomes: list[str] = []
        refused: set[str] = set()

        async def client() -> None:
            for _ in range(8):
                hold = one.hold(chance.choice("abcdef"))
                try:
                    if chance.random() < 0.1:
                        await asyncio.wait_for(asyncio.shield(hold.granted), 0)
                    else:
                        await hold.granted
                    holds.add(hold)
                    assert hold.model in models.loaded
                    for _ in range(chance.randrange(6)):
                        await asyncio.sleep(0)
                    outcomes.append("served")
                except (NotLoadedError, asyncio.TimeoutError) as error:
                    outcomes.append(type(error).__name__)
                    if isinstance(error, NotLoadedError):
                        refused.add(hold.model)
                finally:
                    holds.discard(hold)
                    one.release(hold)

        async def user() -> None:
            for _ in range(10):
                clock.now += chance.choice([0, 1, 10, 60])
                one.check()
                if chance.random() < 0.2:
                    await one.unload(chance.choice("abcde"))
                for _ in range(chance.randrange(10)):
                    await asyncio.sleep(0)

        await asyncio.gather(*(client() for _ in range(5)), user())
        assert len(outcomes) == 40
        assert refused <= models.broken
        await settled()
        assert models.most[0] <= limit
        assert not any(report_of(one, name).waited_for for name in "abcdef")

    go(scenario())


@pytest.mark.parametrize(
    ("seconds", "order"),
    [(1, ["above", "usual", "batch"]), (LATE_AFTER, ["batch", "usual", "above"])],
)
def test_models_are_loaded_by_class_until_one_was_waited_for_too_long(
    seconds: float, order: list[str]
) -> None:
    async def scenario() -> None:
        models = Models(first=1, batch=1, usual=1, above=1)
        one, clock = demand(models, max_loaded=1)
        first = one.hold("first")
        await first.granted
        batch = one.hold("batch", priority=1001)
        clock.now += 1
        waiting = [batch, one.hold("usual")]
        clock.now += seconds
        waiting.append(one.hold("above", priority=-1))
        assert {each.model: each.place for each in waiting} == {
            name: place for place, name in enumerate(order, start=1)
        }
        one.release(first)
        while waiting:
            await settled()
            (granted,) = (each for each in waiting if each.granted.done())
            waiting.remove(granted)
            one.release(granted)
        await settled()
        assert [line[1:] for line in models.history if line[0] == "+"] == ["first", *order]

    go(scenario())


def test_a_class_above_that_waits_for_the_same_model_has_it_loaded_first() -> None:
    async def scenario() -> None:
        models = Models(first=1, a=1, b=1)
        one, _ = demand(models, max_loaded=1)
        first = one.hold("first")
        await first.granted
        a, b = one.hold("a"), one.hold("b", priority=5)
        assert (a.place, b.place) == (1, 2)
        above = one.hold("b", priority=-5)
        assert (a.place, b.place, above.place) == (2, 1, 1)

    go(scenario())
