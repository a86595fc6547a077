"""The load generator's own way to travel, held against gRPC's server."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from llmserve.client.channel import Endpoint
from llmserve.client.model import read_config
from llmserve.client.wire import build_request
from llmserve.measure.bench import Target, bench
from llmserve.measure.job import Place
from llmserve.measure.plan import Prompts
from llmserve.measure.runs import Load
from llmserve.measure.wire import (
    Arrivals,
    Broken,
    DirectLoop,
    Wire,
    frames,
    hpack,
    open_wire,
    path_of,
)
from llmserve.measure.wire.plain import PlainWire
from tests.unit.scripted_triton import Running, scripted


def over(server: Running, work: Callable[[Wire], Coroutine[Any, Any, Any]], way: str) -> Any:
    loop = DirectLoop()

    async def main() -> Any:
        wire = await open_wire(
            Endpoint.make(server.url),
            plain=way != "grpc",
            selector=loop.direct if way == "direct" else None,
        )
        assert wire.name == ("grpc" if way == "grpc" else "plain")
        try:
            return await work(wire)
        finally:
            await wire.close()

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def ways(*found: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("way", found or ("direct", "plain", "grpc"))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(first=0.02, gap=0.01, tokens=(1,) * 5) as running:
        yield running


def request(model: str, prompt: str = "hello") -> bytes:
    config = service_pb2.ModelConfigResponse().config
    config.name, config.max_batch_size = model, 8
    for tensors, name in ((config.input, "text_input"), (config.output, "text_output")):
        tensors.add(name=name, data_type=13, dims=[1])
    raw: bytes = build_request(read_config(config), [prompt], {}).SerializeToString()
    return raw


@ways()
def test_all_ways_bring_the_same(server: Running, way: str) -> None:
    async def work(wire: Wire) -> list[bytes]:
        pieces: Arrivals = []
        await wire.call(path_of("ModelStreamInfer"), request("pieces"), 5.0, pieces)
        whole: Arrivals = []
        await wire.call(path_of("ModelInfer"), request("whole"), None, whole)
        assert [at for at, _ in pieces] == sorted(at for at, _ in pieces)
        return [raw for _, raw in (*pieces, *whole)]

    found = over(server, work, way)
    assert len(found) == 6
    last = service_pb2.ModelInferResponse.FromString(found[-1])
    assert last.raw_output_contents[0] == b"\x01\0\0\0x"


@ways()
def test_failures_have_the_servers_status_and_words(server: Running, way: str) -> None:
    async def work(wire: Wire) -> list[tuple[str, str]]:
        told = []
        nope = service_pb2.ModelConfigRequest(name="nöpe").SerializeToString()
        for path, raw, timeout in (
            (path_of("ModelConfig"), nope, 5.0),
            (path_of("ModelInfer"), request("whole"), 0.005),
            (path_of("SystemSharedMemoryStatus"), b"", 5.0),
        ):
            with pytest.raises(Broken) as error:
                await wire.call(path, raw, timeout, [])
            told.append((error.value.code, error.value.details))
        return told

    told = over(server, work, way)
    assert [code for code, _ in told] == ["NOT_FOUND", "DEADLINE_EXCEEDED", "UNIMPLEMENTED"]
    assert told[0][1] == "Request for unknown model: 'nöpe' is not found"


@ways("direct", "plain")
def test_prompts_larger_than_any_window_come_through(server: Running, way: str) -> None:
    async def work(wire: Wire) -> list[int]:
        # Five of 3 MB at once, where a server allows 64 kB until it has read.
        raw = request("whole", "x" * 3_000_000)
        answers: list[Arrivals] = [[] for _ in range(5)]
        calls = (wire.call(path_of("ModelInfer"), raw, 20.0, one) for one in answers)
        await asyncio.gather(*calls)
        return [len(one) for one in answers]

    assert over(server, work, way) == [1] * 5


@ways("direct", "plain")
def test_a_call_that_is_cancelled_leaves_the_others_alone(server: Running, way: str) -> None:
    async def work(wire: Wire) -> int:
        pieces: list[Arrivals] = [[] for _ in range(4)]
        calls = [
            asyncio.ensure_future(
                wire.call(path_of("ModelStreamInfer"), request("pieces"), None, one)
            )
            for one in pieces
        ]
        await asyncio.sleep(0.035)
        calls[0].cancel()
        await asyncio.gather(*calls[1:])
        assert len(pieces[0]) < 5
        return sum(len(one) for one in pieces[1:])

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


def test_what_is_read_directly_leaves_the_loop_its_own(server: Running) -> None:
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


class Strange:
    """A server that greets, allows little and closes without a word, or talks of something else."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        connection.recv(65536)
        connection.sendall(self._answer)
        connection.close()
        self._socket.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
        frames.pack(frames.GOAWAY, 0, 0, struct.pack(">II", 0, 0)),
        frames.pack(frames.SETTINGS, 0, 0) + frames.pack(frames.HEADERS, 5, 1, b"\xbe"),
        frames.pack(frames.HEADERS, 5, 1, hpack.encode([("grpc-status", "14")])),
    ],
    ids=["no HTTP/2", "nothing", "goes away", "strange headers", "a proxy's status"],
)
def test_what_it_does_not_understand_is_left_to_the_library(answer: bytes) -> None:
    async def main() -> str:
        wire = await open_wire(Endpoint.make(Strange(answer).url))
        await wire.close()
        return wire.name

    assert asyncio.run(main()) == "grpc"


def test_tls_is_left_to_the_library(tmp_path: Path) -> None:
    async def main() -> str:
        wire = await open_wire(Endpoint.make("127.0.0.1:1", tls=True))
        await wire.close()
        return wire.name

    assert asyncio.run(main()) == "grpc"


def test_a_server_may_limit_how_much_is_under_way() -> None:
    async def main() -> list[int]:
        most = 0
        under_way = 0

        def answer(writer: asyncio.StreamWriter, stream: int) -> None:
            nonlocal under_way
            under_way -= 1
            status = hpack.encode([("grpc-status", "0")])
            writer.write(frames.pack(frames.HEADERS, 5, stream, status))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal most, under_way
            writer.write(frames.pack_settings({frames.MAX_STREAMS: 2}))
            splitter = frames.Splitter()
            await reader.readexactly(len(frames.PREFACE))
            while data := await reader.read(65536):
                for kind, _, stream, _ in splitter.feed(data):
                    if kind == frames.HEADERS:
                        under_way += 1
                        most = max(most, under_way)
                        loop = asyncio.get_running_loop()
                        loop.call_later(0.02, answer, writer, stream)

        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        wire = PlainWire(Endpoint.make(f"127.0.0.1:{port}"))
        await wire.call("/a/b", b"", 5.0, [])
        done = await asyncio.gather(*(wire.call("/a/b", b"x", 5.0, []) for _ in range(9)))
        await wire.close()
        listening.close()
        await asyncio.sleep(0.05)
        return [most, len(done)]

    assert asyncio.run(main()) == [2, 9]


@pytest.mark.parametrize("plain", ["", "1"], ids=["plain", "grpc"])
def test_a_measurement_says_how_its_requests_travelled(
    server: Running, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSERVE_BENCH_GRPC", plain)
    load = Load.closed(2, requests=4, stream=True)
    found = bench(Target("pieces", Place(server.url)), load, Prompts())
    assert found.loader.wire == ("grpc" if plain else "plain")
    assert [record.tokens for record in found.records] == [(1,) * 5] * 4
