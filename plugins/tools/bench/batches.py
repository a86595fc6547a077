"""What a batch costs those who ask live: their latency with and without 5,000 requests behind them.

    python -m plugins.tools.bench.batches [--rounds 3] [--plugin openvino] [--beside 1]

Clients ask for a stream, and pause for a random time before they ask again, so that there are
moments without any. They do so alone and beside a batch, in turns; what the batch has answered
after its turn is kept, it is cancelled, and the next turn begins one of the rest. At the end the
last one is left alone with the model, and each of its lines must have its answer once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

import openai
from openai.types import Batch
from rich.console import Console
from rich.table import Table

from llmserve.testing import LiveTriton
from tests.real.model import converted_model

REQUESTS = 5000
MODEL = "m"
_WORDS = ("one", "day", "a", "fox", "met", "the", "bear", "by", "river", "and", "asked", "for")


@dataclass
class Times:
    """What live clients have waited, in seconds."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def add(self, other: Times) -> None:
        self.first += other.first
        self.whole += other.whole


def p(values: list[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


@contextmanager
def gateway(url: str, folder: Path, beside: int) -> Iterator[str]:
    words = ["--port", "0", "--url", url, "--batches", str(folder), "--batch-beside", str(beside)]
    command = [sys.executable, "-m", "llmserve_gateway", *words]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=log)
        try:
            yield address
        finally:
            process.terminate()
            drain.wait()


def prompt(chance: random.Random) -> str:
    return " ".join(chance.choices(_WORDS, k=chance.randint(4, 40)))


def requests(count: int, tokens: int) -> bytes:
    chance = random.Random(7)
    lines = (
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": prompt(chance), "max_tokens": tokens},
        }
        for number in range(count)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def live(
    client: openai.AsyncOpenAI, seconds: float, clients: int, pause: float, tokens: int, seed: int
) -> Times:
    """Ask with several clients for a while."""
    times, end = Times(), time.perf_counter() + seconds

    async def ask(chance: random.Random) -> None:
        await asyncio.sleep(chance.expovariate(1 / pause))
        while time.perf_counter() < end:
            began, first = time.perf_counter(), None
            stream = await client.completions.create(
                model=MODEL, prompt=prompt(chance), max_tokens=tokens, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for _ in stream:
                first = first or time.perf_counter()
            assert first is not None
            times.first.append(first - began)
            times.whole.append(time.perf_counter() - began)
            await asyncio.sleep(chance.expovariate(1 / pause))

    await asyncio.gather(*(ask(random.Random(seed + number)) for number in range(clients)))
    return times


def completed(batch: Batch) -> int:
    return batch.request_counts.completed if batch.request_counts else 0


async def measure(
    client: openai.AsyncOpenAI, options: argparse.Namespace
) -> tuple[Times, Times, int, str]:
    """Return the times alone and beside a batch, and what the batches have answered."""
    alone, beside, answered = Times(), Times(), 0
    file = await client.files.create(
        file=("requests.jsonl", requests(options.requests, 16)), purpose="batch"
    )

    def ask(seed: int) -> asyncio.Future[Times]:
        load = (options.seconds, options.clients, options.pause, options.tokens, seed)
        return asyncio.ensure_future(live(client, *load))

    await ask(0)
    for number in range(options.rounds):
        alone.add(await ask(100 * number))
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        beside.add(await ask(100 * number))
        batch = await client.batches.retrieve(batch.id)
        answered += completed(batch)
        if number < options.rounds - 1:
            await client.batches.cancel(batch.id)
            while batch.status != "cancelled":
                await asyncio.sleep(0.05)
                batch = await client.batches.retrieve(batch.id)
    began, left = time.perf_counter(), options.requests - completed(batch)
    deadline = began + options.rest
    while batch.status != "completed" and time.perf_counter() < deadline:
        await asyncio.sleep(0.1)
        batch = await client.batches.retrieve(batch.id)
    if batch.output_file_id is None:
        return alone, beside, answered, f"not done after {options.rest:.0f} s more"
    rate = f"{left / (time.perf_counter() - began):.1f} a second alone" if left else "done beside"
    text = (await client.files.content(batch.output_file_id)).text
    names = [json.loads(line)["custom_id"] for line in text.splitlines()]
    assert sorted(names) == sorted(map(str, range(options.requests)))
    return alone, beside, answered, f"{rate}, each line answered once"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rest", type=float, default=240, help="to finish the last batch")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--plugin", default="openvino")
    parser.add_argument("--real", action="store_true", help="with the real chat model")
    parser.add_argument("--beside", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    console = Console()
    model = str(converted_model()) if options.real else "demo"
    with tempfile.TemporaryDirectory() as home, LiveTriton.start(Path(home) / "models") as triton:
        triton.build(options.plugin, model, name=MODEL)
        (batches := Path(home) / "batches").mkdir(mode=0o700)
        with gateway(triton.server.grpc_url, batches, options.beside) as url:
            client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600)
            alone, beside, answered, end = asyncio.run(measure(client, options))
    table = Table("seconds", "alone", "beside a batch", "ratio")
    for name, first, second in (
        ("first token", alone.first, beside.first),
        ("whole answer", alone.whole, beside.whole),
    ):
        for percent in (50, 95, 99):
            one, two = p(first, percent), p(second, percent)
            table.add_row(f"{name}, p{percent}", f"{one:.3f}", f"{two:.3f}", f"{two / one:.2f}")
    console.print(table)
    turns = options.rounds * options.seconds
    console.print(
        f"{len(alone.whole)} and {len(beside.whole)} live requests; the batches answered "
        f"{answered} in {turns:.0f} s beside them; {end}"
    )


if __name__ == "__main__":
    main()
