"""What the gateway keeps of requests whose clients have left."""

from __future__ import annotations

import asyncio
import subprocess
import time
from itertools import pairwise

from llmserve.testing import ScriptedTriton

from .gateways import gateway_process

BODY = b'{"model": "m", "prompt": "Hi", "stream": true}'
STREAM = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    + BODY
)
# The log would fill the pipe of standard error. What C libraries hold is seen by malloc alone.
REPORT = """
import ctypes, gc, os, threading
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks",
                "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]
mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
def report():
    for _ in sys.stdin:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        gc.collect()
        if mallinfo:
            mallinfo.restype = Info
        print(sys.getallocatedblocks(), mallinfo().uordblks if mallinfo else 0, flush=True)
threading.Thread(target=report, daemon=True).start()
"""


# Until the client leaves.
ENDLESS = ScriptedTriton(["x"] * 1_000_000, gap=0.002, models={"m": "stream"})


async def cut(port: int, streams: int) -> None:
    async def client(number: int) -> None:
        for count in range(streams // 8):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(STREAM)
            await reader.readuntil(b"data:")
            if (number + count) % 2:
                writer.transport.abort()
            writer.close()

    await asyncio.gather(*map(client, range(8)))


def held(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Return the blocks of Python and the bytes of malloc that are in use, once both are still."""
    assert process.stdin is not None
    assert process.stdout is not None
    last = None
    deadline = time.monotonic() + 30
    while True:
        process.stdin.write("\n")
        process.stdin.flush()
        blocks, size = map(int, process.stdout.readline().split())
        if last is not None and abs(blocks - last) < 50:
            return blocks, size
        assert time.monotonic() < deadline
        last = blocks
        time.sleep(0.3)


def test_streams_that_are_cut_off_leave_nothing() -> None:
    streams = 1000
    with (
        ENDLESS.serving() as url,
        gateway_process(limits="64, 64", url=url, before=REPORT) as (process, port),
    ):
        held(process)  # From here on, nobody reads the log.
        asyncio.run(cut(port, 400))
        rounds = [held(process)]
        for _ in range(3):
            asyncio.run(cut(port, streams))
            rounds.append(held(process))
    grown = [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in pairwise(rounds)]
    # What libraries keep for reuse, such as a loop's handles, grows once, at some moment. What
    # streams leave grows with each round.
    assert min(blocks for blocks, _ in grown) < streams / 4, grown
    # A cancelled read of gRPC left 340 bytes per stream.
    assert min(size for _, size in grown) < streams * 120, grown
