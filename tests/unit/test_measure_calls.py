"""Calls of the load generator: who waits, who is told, who gives up, and the loop beside them."""

from __future__ import annotations

import asyncio
import subprocess
import time
from functools import partial

import pytest

from llmserve.measure.wire import Arrivals, Broken, DirectLoop, Wire, path_of
from tests.unit.scripted_triton import scripted
from tests.unit.wires import five_pieces, over, request, ways


@ways("direct", "plain")
def test_a_call_that_is_cancelled_leaves_the_others_alone(way: str) -> None:
    async def work(wire: Wire) -> int:
        pieces: list[Arrivals] = [[] for _ in range(4)]
        calls = [
            asyncio.ensure_future(
                wire.call(path_of("ModelStreamInfer"), request("pieces"), None, one)
            )
            for one in pieces
        ]
        await asyncio.sleep(0.15)
        calls[0].cancel()
        await asyncio.gather(*calls[1:])
        assert len(pieces[0]) < 5
        return sum(len(one) for one in pieces[1:])

    with scripted(first=0.02, gap=0.1, tokens=(1,) * 5) as server:
        assert over(server, work, way) == 15


@ways("direct", "plain")
def test_each_call_has_the_time_that_it_was_given(way: str) -> None:
    with scripted(first=2.0) as running:

        async def work(wire: Wire) -> list[tuple[float | None, str]]:
            told: list[tuple[float | None, str]] = []

            async def ended(timeout: float | None) -> None:
                began = time.monotonic()
                try:
                    await wire.call(path_of("ModelInfer"), request("whole"), timeout, [])
                except Broken as error:
                    assert (timeout or 0.0) <= time.monotonic() - began < 1.5
                    told.append((timeout, error.code))
                else:
                    told.append((timeout, "OK"))

            # Not in the order in which they end, and one that has no end.
            await asyncio.gather(*map(ended, (None, 20.0, 0.6, 0.2, 0.4, 20.0)))
            return told

        told = over(running, work, way)
        assert told[:3] == [(seconds, "DEADLINE_EXCEEDED") for seconds in (0.2, 0.4, 0.6)]
        assert [code for _, code in told[3:]] == ["OK"] * 3


@ways()
def test_who_does_not_wait_is_told_once_and_not_after_giving_up(way: str) -> None:
    async def work(wire: Wire) -> list[tuple[int, str]]:
        told: list[tuple[int, str]] = []
        last = asyncio.get_running_loop().create_future()
        path, raw = path_of("ModelStreamInfer"), request("pieces")

        def ended(at: int, code: str, details: str) -> None:
            assert not details
            told.append((at, code))
            if len(told) < 3:
                # The next from where the last was read, as a load generator does.
                wire.begin(path, raw, 5.0, [], partial(ended, at + 10))
            else:
                # What a hearer gives the loop to do, the loop does at once.
                asyncio.get_running_loop().call_soon(last.set_result, time.monotonic())

        given_up = wire.begin(path, raw, 5.0, [], partial(ended, 1))
        wire.begin(path, raw, 5.0, [], partial(ended, 2))
        await asyncio.sleep(0.05)
        given_up()
        at = await asyncio.wait_for(last, 5.0)
        # Nothing else would wake it before a call's five seconds are over.
        assert time.monotonic() - at < 2.0
        return told

    with scripted(first=0.4) as running:
        assert over(running, work, way) == [(2, "OK"), (12, "OK"), (22, "OK")]


@ways("direct", "plain")
def test_begun_where_there_is_no_connection_it_is_told_as_well(way: str) -> None:
    with scripted() as running:

        async def work(wire: Wire) -> list[str]:
            told: asyncio.Queue[str] = asyncio.Queue()

            def ended(code: str, details: str) -> None:
                told.put_nowait(f"{code} {details}")

            async def one() -> str:
                wire.begin(path_of("ModelInfer"), request("whole"), 1.0, [], ended)
                return await asyncio.wait_for(told.get(), 5.0)

            vars(wire)["_connection"].close()
            found = [await one()]
            running.process.kill()
            running.process.wait()
            return [*found, await one(), await one()]

        anew, lost, gone = over(running, work, way)
        assert anew == "OK "
        assert lost.startswith("UNAVAILABLE")
        assert gone.startswith("UNAVAILABLE failed to connect")


@ways("direct", "plain")
def test_a_connection_that_is_lost_fails_what_was_under_way(way: str) -> None:
    with scripted(first=5.0) as running:

        async def work(wire: Wire) -> str:
            call = asyncio.ensure_future(
                wire.call(path_of("ModelInfer"), request("whole"), None, [])
            )
            await asyncio.sleep(0.2)
            running.process.kill()
            with pytest.raises(Broken) as lost:
                await call
            running.process.wait()
            with pytest.raises(Broken) as gone:
                await wire.call(path_of("ModelInfer"), request("whole"), 1.0, [])
            return f"{lost.value.code} {gone.value.code}: {gone.value.details}"

        assert over(running, work, way).startswith("UNAVAILABLE UNAVAILABLE: failed to connect")


def test_what_is_read_directly_leaves_the_loop_its_own() -> None:
    """Timers, other descriptors and a second connection, while a stream is read."""

    async def work(wire: Wire) -> tuple[int, int, int, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        first: Arrivals = []
        second: Arrivals = []
        path = path_of("ModelStreamInfer")
        calls = [asyncio.ensure_future(wire.call(path, request("pieces"), 5.0, first))]
        await asyncio.sleep(0.025)
        # As after a GOAWAY: what is under way is finished, and the next call goes elsewhere.
        vars(wire)["_connection"].closed = True
        calls.append(asyncio.ensure_future(wire.call(path, request("pieces"), 5.0, second)))
        process = await asyncio.create_subprocess_exec("echo", "x", stdout=subprocess.PIPE)
        told, _ = await process.communicate()
        await asyncio.gather(*calls)
        ticking.cancel()
        return len(first), len(second), len(told), ticks

    with five_pieces() as server:
        *counts, ticks = over(server, work, "direct")
    assert counts == [5, 5, 2]
    assert ticks >= 5


@ways("direct")
def test_an_alarm_sounds_in_time_whatever_else_there_is(way: str) -> None:
    """Ten of them, each set by the one before, with and without a connection that is read."""

    async def work(wire: Wire) -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, DirectLoop)
        late: list[float] = []
        last = loop.create_future()

        def sound(due: float) -> None:
            late.append(time.monotonic() - due)
            if len(late) == 5:
                vars(wire)["_connection"].close()
            if len(late) == 10:
                last.set_result(None)
            else:
                loop.direct.alarm(due + 0.01, partial(sound, due + 0.01))

        call = wire.call(path_of("ModelStreamInfer"), request("pieces"), 5.0, [])
        reading = asyncio.ensure_future(call)
        began = time.monotonic()
        loop.direct.alarm(began, partial(sound, began))
        await asyncio.wait_for(last, 5.0)
        with pytest.raises(Broken):
            await reading
        return late

    with scripted(first=0.01, gap=10.0, tokens=(1, 1)) as running:
        late = over(running, work, way)
    assert min(late) >= 0
    # Nothing else would wake it when there is no connection any more.
    assert sorted(late)[5] < 0.05
