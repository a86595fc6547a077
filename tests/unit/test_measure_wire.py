"""The load generator's own way to travel, held against gRPC's server."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from tritonclient.grpc import service_pb2

from llmserve.client.channel import Endpoint
from llmserve.measure.bench import Target, bench
from llmserve.measure.job import Place
from llmserve.measure.plan import Prompts
from llmserve.measure.runs import Load
from llmserve.measure.wire import (
    Arrivals,
    Broken,
    Wire,
    frames,
    hpack,
    open_wire,
    path_of,
)
from llmserve.measure.wire.plain import PlainWire
from tests.unit.scripted_triton import Running
from tests.unit.wires import five_pieces, over, request, ways


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with five_pieces() as running:
        yield running


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
