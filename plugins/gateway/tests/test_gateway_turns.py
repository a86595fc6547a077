"""Who goes first of those that wait, on a clock that only the tests move."""

from __future__ import annotations

import asyncio
import json
import random
import selectors
from collections import Counter, defaultdict
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.client import Completion
from llmserve.errors import ClientError
from llmserve.runtime import ArrayLogits, Chunk, Engine, Generation
from llmserve.runtime.contract import LAST_CLASS, LATE_AFTER, LATE_EVERY, PRIORITY_CLASS
from llmserve.testing import ByteTokenizer, generation
from llmserve_gateway.admission import Admission, Claim, Limits, loses_place
from llmserve_gateway.batches.calls import Call
from llmserve_gateway.errors import ApiError
from llmserve_gateway.gateway import Settings
from llmserve_gateway.keys import BatchKey, new_key
from llmserve_gateway.turns import Party, Standing, Turns, Waiter

from .gateways import NO_TRITON, TEXT, Triton, app_before


class _Selector(selectors.SelectSelector):
    """Has no time pass but that for which a loop would sleep."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += max(0.0, timeout or 0.0)
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def simulated(coroutine: Coroutine[Any, Any, None]) -> None:
    loop = SimulatedLoop()
    try:
        loop.run_until_complete(coroutine)
    finally:
        loop.close()


CLASSES = {0: (1, 2, 3), 1: (1, 1, 2), 2: (1, 2, 3, 4)}
KEYS = [
    Standing(f"{priority}.{number}", weight, priority)
    for priority, weights in CLASSES.items()
    for number, weight in enumerate(weights)
]
SECONDS, SLOTS, EACH = 600.0, 16, 12
"""How long it lasts, the slots, and how many requests of each key wait or run."""


class _Runner:
    """Finds every token as likely as the others, so that answers are as long as they may be."""

    page_count, page_size, accepts_runs = 64, 16, False

    def run(self, chunks: Sequence[Chunk]) -> ArrayLogits:
        return ArrayLogits(np.zeros((sum(chunk.rows for chunk in chunks), 2), np.float32))


class _Model:
    """An engine that computes a token of each sequence in a tenth of a second."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        places = SLOTS // 2
        self._engine = Engine(_Runner(), ByteTokenizer(), max_sequences=places, clock=loop.time)
        self._answers: dict[Generation, asyncio.Future[None]] = {}

    async def answer(self, standing: Standing, tokens: int) -> None:
        asked = generation([1] * 8, tokens, priority_class=standing.priority)
        self._engine.admit(asked)
        done = self._answers[asked] = asyncio.get_running_loop().create_future()
        await done

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            assert not self._engine.step().failed
            for each in [each for each in self._answers if each.done]:
                self._answers.pop(each).set_result(None)


def test_an_engine_behind_it_keeps_the_shares_of_ten_keys_and_lets_nobody_starve() -> None:
    """It has half as many places as the gateway has slots, so that classes wait there as well."""
    used: Counter[Standing] = Counter()
    waits: defaultdict[int, list[float]] = defaultdict(list)
    turns = 0

    async def user(
        admission: Admission, model: _Model, standing: Standing, chance: random.Random
    ) -> None:
        nonlocal turns
        loop, parties = asyncio.get_running_loop(), [Party("key", standing.name)]
        while (since := loop.time()) < SECONDS:
            tokens = chance.randrange(1, 20)
            turn = admission.admit(1, None, parties, standing=standing, tokens=8)
            async with turn as claim:
                if loop.time() < SECONDS:
                    await model.answer(standing, tokens)
                    turns += 1
                    waits[standing.priority].append(loop.time() - since)
                    used[standing] += tokens + 8
                claim.used = tokens + 8

    async def run() -> None:
        admission, model = Admission(Limits(max_requests=SLOTS)), _Model()
        running = asyncio.ensure_future(model.run())
        chance = random.Random(61)
        users = [user(admission, model, key, random.Random(chance.random())) for key in KEYS * EACH]
        await asyncio.gather(*users)
        running.cancel()
        assert (admission.running, admission.waiting) == (0, 0)

    simulated(run())
    for priority, weights in CLASSES.items():
        members = [key for key in KEYS if key.priority == priority]
        whole = sum(used[key] for key in members)
        for key in members:
            assert used[key] / whole == pytest.approx(key.weight / sum(weights), rel=0.1), key
        if priority:
            # As without an engine, and once more what one waits for before its turn there.
            longest = EACH * sum(weights) * 2 * LATE_EVERY / (turns / SECONDS) * 1.5
            assert LATE_AFTER < max(waits[priority]) < 2 * LATE_AFTER + longest
    assert sum(used[key] for key in KEYS if key.priority == 0) > 0.8 * sum(used.values())
    assert max(waits[0]) < LATE_AFTER


def test_ten_keys_of_three_classes_share_one_model_for_ten_minutes() -> None:
    used: Counter[Standing] = Counter()
    waits: defaultdict[int, list[float]] = defaultdict(list)
    turns = 0

    async def user(admission: Admission, standing: Standing, chance: random.Random) -> None:
        nonlocal turns
        loop, parties = asyncio.get_running_loop(), [Party("key", standing.name)]
        # Some write long prompts, and some have long answers, which nobody knows before.
        prompt = chance.choice([5, 50, 300])
        while (since := loop.time()) < SECONDS:
            tokens = prompt + chance.randrange(1, 400)
            turn = admission.admit(1, None, parties, standing=standing, tokens=prompt)
            async with turn as claim:
                began = loop.time()
                if began < SECONDS:
                    turns += 1
                    waits[standing.priority].append(began - since)
                    await asyncio.sleep(tokens / 300)
                    used[standing] += tokens
                claim.used = tokens

    async def run() -> None:
        admission = Admission(Limits(max_requests=SLOTS))
        chance = random.Random(61)
        users = [user(admission, key, random.Random(chance.random())) for key in KEYS * EACH]
        await asyncio.gather(*users)
        assert (admission.running, admission.waiting) == (0, 0)

    simulated(run())
    for priority, weights in CLASSES.items():
        members = [key for key in KEYS if key.priority == priority]
        whole = sum(used[key] for key in members)
        for key in members:
            assert used[key] / whole == pytest.approx(key.weight / sum(weights), rel=0.1), key
    # The class above has what is left by the turns of those that have waited too long.
    assert sum(used[key] for key in KEYS if key.priority == 0) > 0.8 * sum(used.values())
    assert max(waits[0]) < LATE_AFTER, "the first class never waits that long"
    # Two classes are late and share one turn in LATE_EVERY, and the last of a key's requests waits
    # for those before it. A request of twice as many tokens as the others' takes twice their turns.
    for priority, weights in CLASSES.items():
        if priority:
            longest = EACH * sum(weights) * 2 * LATE_EVERY / (turns / SECONDS) * 1.5
            assert LATE_AFTER < max(waits[priority]) < LATE_AFTER + longest


def waiter(name: str = "", priority: int = 0, since: float = 0, weight: int = 1) -> Waiter:
    return Waiter(Standing(name, weight, priority), 100, since)


def test_a_class_above_goes_first_and_within_it_who_has_used_less() -> None:
    turns: Turns[Waiter] = Turns()
    flood = [waiter("flood", since=number) for number in range(4)]
    low, high = waiter("low", 5), waiter("high", -5, since=9)
    for each in (*flood, low):
        turns.join(each)
    turns.begin(flood[0], 9)
    small = waiter("small", since=9)
    for each in (small, high):
        turns.join(each)
    assert list(turns.order(9)) == [high, small, *flood[1:], low]
    turns.leave(small)
    turns.leave(small)
    assert list(turns.order(9, lambda each: each is not high)) == [*flood[1:], low]


def test_who_comes_anew_goes_next_whatever_others_used_before() -> None:
    turns: Turns[Waiter] = Turns()
    for number in range(50):
        turns.join(each := waiter("old", since=number))
        turns.begin(each, number)
    waiting = [waiter("old", since=50) for _ in range(3)]
    for each in waiting:
        turns.join(each)
    turns.join(new := waiter("new", since=51))
    turns.join(second := waiter("new", since=51))
    assert list(turns.order(51))[:2] == [new, waiting[0]]
    turns.begin(new, 51)
    assert list(turns.order(51)) == [waiting[0], second, *waiting[1:]], "and has no more than that"


@pytest.mark.parametrize("used", [10, 1000])
def test_what_a_request_has_used_counts_and_not_what_was_expected(used: int) -> None:
    turns: Turns[Waiter] = Turns()
    first, other = waiter("a"), waiter("b")
    for each in (first, other, keeps := waiter("b"), again := waiter("a")):
        turns.join(each)
    turns.begin(first, 0)
    turns.begin(other, 0)
    first.used, other.used = used, 100
    turns.end(first)
    turns.end(other)
    assert next(turns.order(0)) is (again if used == 10 else keeps)


def test_what_is_over_leaves_nothing_behind() -> None:
    turns: Turns[Waiter] = Turns()
    for number in range(1000):
        turns.join(each := waiter(f"key{number}", number % 7))
        if number % 2:
            turns.leave(each)
        else:
            turns.begin(each, 0)
            turns.end(each)
    assert not turns
    assert not vars(turns)["_classes"]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab")), min_size=1, max_size=60))
@settings(deadline=None)
def test_a_class_that_is_late_has_one_turn_in_so_many(arrivals: list[tuple[int, str]]) -> None:
    turns: Turns[Waiter] = Turns()
    for number, (priority, name) in enumerate(arrivals):
        turns.join(waiter(name, priority, since=number / 100))
    now, passed = LATE_AFTER + 1, 0
    while turns:
        # A flood of the class above never ends.
        for number in range(3):
            turns.join(waiter(f"flood{number}", -1, since=now))
        late = [
            each for each in turns if now - each.since >= LATE_AFTER and each.standing.priority >= 0
        ]
        if not late:
            break
        oldest = min(late, key=lambda each: each.since)
        first = next(turns.order(now))
        turns.begin(first, now)
        if first.standing.priority == oldest.standing.priority:
            passed = 0
        else:
            passed += 1
        assert passed < LATE_EVERY
        now += 0.001


ARRIVALS = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.integers(0, 90),
            "priority": st.integers(-2, 2),
            "key": st.integers(0, 4),
            "answers": st.integers(1, 9),
            "runs": st.integers(0, 40),
            "leaves": st.one_of(st.none(), st.integers(0, 50)),
            "seconds": st.one_of(st.none(), st.integers(1, 60)),
            "tokens": st.integers(0, 500),
            "used": st.one_of(st.none(), st.integers(0, 5000)),
        }
    ),
    max_size=40,
)


@given(ARRIVALS)
@settings(deadline=None)
def test_whatever_comes_and_leaves_nobody_is_stuck(arrivals: list[dict[str, Any]]) -> None:
    limits = Limits(max_requests=4, max_queue=20)
    outcomes: Counter[str] = Counter()

    async def ask(admission: Admission, each: dict[str, Any]) -> None:
        await asyncio.sleep(each["at"])
        standing = Standing(f"key{each['key']}", each["key"] + 1, each["priority"])
        turn = admission.admit(
            each["answers"],
            each["seconds"],
            [Party("key", standing.name), Party("model", str(each["key"] % 2))],
            standing=standing,
            tokens=each["tokens"],
        )
        try:
            async with turn as claim:
                assert admission.running <= limits.max_requests
                await asyncio.sleep(each["runs"])
                claim.used = each["used"]
        except ApiError as error:
            outcomes[error.code or ""] += 1
        else:
            outcomes["answered"] += 1

    async def run() -> None:
        admission = Admission(limits)
        tasks = []
        for each in arrivals:
            tasks.append(asyncio.ensure_future(ask(admission, each)))
            if each["leaves"] is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(each["at"] + each["leaves"], tasks[-1].cancel)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in done)
        assert (admission.running, admission.waiting) == (0, 0)
        assert not vars(vars(admission)["_turns"])["_classes"]

    simulated(run())
    assert set(outcomes) <= {"answered", "timeout", "queue_full"}


def test_a_large_request_of_the_last_class_gets_its_slots() -> None:
    async def run() -> None:
        admission = Admission(Limits(max_requests=8))
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        async def flood() -> None:
            while not done.is_set():
                async with admission.admit():
                    await asyncio.sleep(random.random())

        floods = [asyncio.ensure_future(flood()) for _ in range(20)]
        await asyncio.sleep(5)
        async with admission.admit(8, standing=Standing("large", 1, 9)):
            # All others have ended then, which takes a second more.
            assert LATE_AFTER + 5 <= loop.time() <= LATE_AFTER + 5 + 3
            done.set()
        await asyncio.gather(*floods)

    simulated(run())


class Slow(Triton):
    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        self.prompts.append(prompt)
        await asyncio.sleep(0.02)
        return await super().generate(name, prompt, **options)


def test_keys_and_requests_say_in_which_class_they_are(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = {
        "first": new_key(file, "first", priority=-1),
        "usual": new_key(file, "usual"),
        "free": new_key(file, "free", priority=5, any_priority=True),
    }
    triton = Slow()

    async def go() -> dict[str, httpx.Response]:
        app = app_before(triton, Settings(NO_TRITON, Limits(2, 20), keys=file))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

            async def ask(name: str, key: str, **fields: Any) -> tuple[str, httpx.Response]:
                body = {"model": "m", "prompt": name, **fields}
                headers = {"x-api-key": keys[key]}
                return name, await client.post("/v1/completions", json=body, headers=headers)

            begun = [asyncio.ensure_future(ask("runs", key)) for key in ("usual", "first")]
            while len(triton.prompts) < 2:
                await asyncio.sleep(0.001)
            asked = [
                ask("free", "free"),
                ask("later", "usual", priority=9),
                ask("usual", "usual", priority=0),
                ask("refused", "usual", priority=-1),
                ask("far", "usual", priority=1001),
                ask("first", "first"),
                ask("above", "free", priority=-7),
            ]
            return dict([*await asyncio.gather(*asked), *await asyncio.gather(*begun)])

    answers = asyncio.run(go())
    assert triton.prompts[2:] == ["above", "first", "usual", "free", "later"]
    assert {name: r.status_code for name, r in answers.items() if r.status_code != 200} == {
        "refused": 403, "far": 400,
    }  # fmt: skip
    error = answers["refused"].json()["error"]
    assert (error["code"], error["param"]) == ("priority_not_allowed", "priority")
    assert "have priority 0" in error["message"]


def test_models_are_told_the_class_of_a_request(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = {"first": new_key(file, "first", priority=-1), "usual": new_key(file, "usual")}
    triton = Triton()

    async def go() -> None:
        app = app_before(triton, Settings(NO_TRITON, keys=file))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            asked: list[tuple[str, dict[str, int]]] = [
                ("first", {}), ("usual", {}), ("usual", {"priority": 7}),
            ]  # fmt: skip
            for key, fields in asked:
                headers = {"x-api-key": keys[key]}
                await client.post("/v1/completions", json={**TEXT, **fields}, headers=headers)
        await Call(app, "/v1/completions", json.dumps(TEXT).encode(), BatchKey("", "")).answer()

    asyncio.run(go())
    told = [request.get(PRIORITY_CLASS) for request in triton.requests]
    assert told == [-1, None, 7, LAST_CLASS]


def test_a_wait_that_ends_early_counts_nothing() -> None:
    async def run() -> None:
        admission = Admission(Limits(max_requests=1))
        async with admission.admit():
            for number in range(5):
                with suppress(ApiError):
                    async with admission.admit(seconds=1, standing=Standing(str(number), 1, 1)):
                        raise AssertionError
        assert (admission.running, admission.waiting) == (0, 0)

    simulated(run())


class Failing(Slow):
    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        answer = await super().generate(name, prompt, **options)
        if prompt == "fails":
            raise ClientError("gone", code="model_died")
        return answer


def test_requests_that_end_without_an_answer_are_not_free(tmp_path: Path) -> None:
    file, triton = tmp_path / "keys", Failing()
    keys = {prompt: new_key(file, prompt) for prompt in ("fails", "fine")}

    async def go() -> None:
        app = app_before(triton, Settings(NO_TRITON, Limits(1, 100), keys=file))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

            async def ask(prompt: str) -> None:
                body = {"model": "m", "prompt": prompt, "max_tokens": 8}
                headers = {"x-api-key": keys[prompt]}
                await client.post("/v1/completions", json=body, headers=headers)

            await asyncio.gather(*map(ask, ["fails"] * 6 + ["fine"] * 3))

    asyncio.run(go())
    assert triton.prompts[:6].count("fine") >= 2


def claim_of(
    name: str, *, weight: int = 1, priority: int = 0, slots: int = 1, since: float = 0.0
) -> Claim:
    turn: Any = Future()
    standing = Standing(name, weight, priority)
    return Claim(standing, 1, since, slots=slots, parties=frozenset(), turn=turn)


CLAIMS = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from([0, 0, 1]), st.integers(1, 3), st.floats(0, 1.5)
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(found=CLAIMS, most=st.integers(0, 20))
def test_who_has_more_places_than_its_weight_loses_its_own(
    found: list[tuple[int, int, int, float]], most: int
) -> None:
    made = [
        claim_of(f"{key}", weight=key + 1, priority=number, slots=slots, since=-age * LATE_AFTER)
        for key, number, slots, age in found
    ]
    made[-1].since = 0.0
    new, others = made[-1], made[:-1]
    leaving = loses_place(new, made, most)
    if leaving is None:
        # Even without all of a class below that might go, there is no place for it.
        below = [
            each
            for each in others
            if -each.since < LATE_AFTER and each.standing.priority > new.standing.priority
        ]
        assert sum(each.slots for each in made if each not in below) > most
        return
    left = [each for each in made if each not in leaving]
    assert new in left
    assert not leaving or sum(each.slots for each in left) <= most
    # And no more have gone than had to.
    assert not leaving or sum(each.slots for each in [*left, leaving[-1]]) > most
    for gone in leaving:
        assert -gone.since < LATE_AFTER
        assert gone.standing.priority >= new.standing.priority
        # It was the last of its key.
        later = made[made.index(gone) + 1 :]
        assert all(
            each in leaving or -each.since >= LATE_AFTER
            for each in later
            if each.standing == gone.standing
        )
        if gone.standing.priority == new.standing.priority:
            assert gone.standing.name != new.standing.name


def test_a_key_that_floods_loses_its_own_places_first() -> None:
    outcomes: dict[str, list[str]] = defaultdict(list)

    async def run() -> None:
        admission = Admission(Limits(max_requests=1, max_queue=8))

        async def ask(standing: Standing) -> None:
            try:
                async with admission.admit(standing=standing):
                    await asyncio.sleep(1)
            except ApiError as error:
                outcomes[standing.name].append(error.code or "")
            else:
                outcomes[standing.name].append("answered")

        flood, small = Standing("flood"), Standing("small")
        first = Standing("first", priority=-1)
        begun = [asyncio.ensure_future(ask(flood)) for _ in range(12)]
        await asyncio.sleep(0.1)
        assert (admission.waiting, outcomes["flood"]) == (8, ["queue_full"] * 3)
        begun += [asyncio.ensure_future(ask(small)) for _ in range(5)]
        await asyncio.sleep(0.1)
        # Each has half of the places: four of the one have gone, and the fifth of the other.
        assert admission.waiting == 8
        assert Counter(outcomes["flood"]) == {"queue_full": 7}
        assert outcomes["small"] == ["queue_full"]
        begun += [asyncio.ensure_future(ask(first)) for _ in range(3)]
        await asyncio.gather(*begun)

    simulated(run())
    assert outcomes["first"] == ["answered"] * 3
    assert Counter(outcomes["flood"])["answered"] + Counter(outcomes["small"])["answered"] == 6
    assert abs(outcomes["flood"].count("answered") - 1 - outcomes["small"].count("answered")) <= 1
