"""What the gateway costs: a model through it and directly, alternating in one run.

    python -m tests.bench.gateway [--rounds 5] [--plugin hf] [--shape demo]

Processor time is the gateway's own, as the system counts it. What a chunk costs is the difference
between long and short streams; what a request costs is the rest of the short ones. Next to the
chunk is what `grpc.aio` alone needs to read one. First tokens are measured one request at a time;
everything else has 32 requests in flight.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import nan
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from llmserve.testing import LiveTriton
from llmserve_bench.figures import figures_of
from llmserve_bench.measure import Plan, bench
from llmserve_bench.prompts import Prompts
from llmserve_bench.results import Load, Run
from llmserve_bench.targets import Target
from llmserve_gateway.commands import GRPC

from .grpc_reader import LONG, SHORT
from .shapes import SHAPES, save

_TOKENS = {"max_tokens": 64, "ignore_eos": True}
FIRST = Load(concurrency=1, requests=40, stream=True, options={"max_tokens": 4})
STREAMS = Load(concurrency=32, requests=96, warmup=32, stream=True, options=_TOKENS)
WHOLE = Load(concurrency=32, requests=96, warmup=32, options=_TOKENS)
FEW = tuple(replace(STREAMS, concurrency=n, requests=2 * n, warmup=n) for n in (1, 8))
DIRECT, THROUGH = "directly", "through the gateway"


@contextmanager
def gateway(url: str) -> Iterator[tuple[str, int]]:
    """Run a gateway in front of a Triton; yield its address and its process id."""
    command = [sys.executable, "-m", "llmserve_gateway", "--port", "0", "--url", url]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        # Its log, one line per request, is not needed here.
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=log)
        try:
            yield address, process.pid
        finally:
            process.terminate()
            drain.wait()


def cpu_seconds(process: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reading_alone(target: Target) -> float:
    """Return the milliseconds of processor time that `grpc.aio` alone needs to read a message."""
    command = [sys.executable, "-m", "tests.bench.grpc_reader", target.url, target.model]
    env = {**os.environ, **GRPC}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return float(done.stdout)


def run(target: Target, load: Load, plan: Plan) -> Run:
    result = bench(target, load, plan).runs[0]
    if len(result.good) != load.requests:
        raise RuntimeError(f"{len(result.records) - len(result.good)} requests failed")
    return result


def costs(target: Target, process: int, plan: Plan) -> tuple[float, float]:
    """Return the milliseconds of a process's time per chunk of a stream, and per request."""
    seconds, chunks = [], []
    for tokens in (SHORT, LONG):
        load = replace(STREAMS, warmup=0, options={**_TOKENS, "max_tokens": tokens})
        before = cpu_seconds(process)
        records = run(target, load, plan).records
        seconds.append(cpu_seconds(process) - before)
        chunks.append(sum(len(record.pieces) for record in records))
    chunk = (seconds[1] - seconds[0]) / (chunks[1] - chunks[0])
    return chunk * 1e3, (seconds[0] - chunk * chunks[0]) / len(records) * 1e3


def measure(targets: dict[str, Target], process: int, rounds: int) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    plan = Plan(Prompts())
    firsts, streams, whole = ({name: list[float]() for name in targets} for _ in range(3))
    smooth: dict[int, dict[str, list[dict[str, float]]]] = {}
    per_chunk, per_request, alone = list[float](), list[float](), list[float]()
    rate = "output_tokens_per_second"
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(targets), len(targets)):
            target = targets[name]
            first = run(target, FIRST, plan)
            firsts[name].append(figures_of(first, FIRST)["ttft_p50"] * 1e3)
            for load in (*FEW, STREAMS):
                figures = figures_of(run(target, load, plan), load)
                smooth.setdefault(load.concurrency or 0, {}).setdefault(name, []).append(figures)
            streams[name].append(figures[rate])
            whole[name].append(figures_of(run(target, WHOLE, plan), WHOLE)[rate])
        chunk, request = costs(targets[THROUGH], process, plan)
        per_chunk.append(chunk)
        per_request.append(request)
        alone.append(reading_alone(targets[DIRECT]))
    for label, rates in (("first token, ms", firsts), ("streams, tokens/s", streams),
                         ("whole answers, tokens/s", whole)):  # fmt: skip
        pairs = list(zip(rates[DIRECT], rates[THROUGH], strict=True))
        added = median(b - a for a, b in pairs), median(b / a for a, b in pairs)
        difference = f"{added[0]:+.1f} ms" if rates is firsts else f"{added[1]:.2f}"
        yield [label, *(cell(values) for values in rates.values()), difference]
    for number, by_name in smooth.items():
        cells = [_smoothness(by_name[name]) for name in targets]
        yield [f"{number} streams: tokens per chunk; gap, ms", *cells, ""]
    beyond = median(b - a for a, b in zip(alone, per_chunk, strict=True))
    yield ["processor time per chunk, ms", f"{cell(alone, 3)} *", cell(per_chunk, 3),
           f"{beyond:+.3f} ms"]  # fmt: skip
    yield ["processor time per request, ms", "", cell(per_request, 2), ""]


def _smoothness(found: list[dict[str, float]]) -> str:
    """Return how many tokens a chunk has, and the gap between two, its median and 95 %."""
    chunk, half, most = (
        median(figures.get(name, nan) for figures in found)
        for name in ("chunk_tokens", "gap_p50", "gap_p95")
    )
    return f"{chunk:.2f}; {half * 1e3:.1f} / {most * 1e3:.1f}"


def cell(values: list[float], digits: int = 1) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plugin", default="hf")
    parser.add_argument("--shape", choices=("demo", *SHAPES), default="demo")
    args = parser.parse_args()
    title = f"{args.shape} by {args.plugin}, medians of {args.rounds} rounds (range)"
    table = Table("", DIRECT, THROUGH, "difference", title=title)
    with tempfile.TemporaryDirectory() as home, LiveTriton.start(Path(home) / "models") as live:
        shape: str = args.shape
        made = shape if shape == "demo" else str(save(shape, "cpu", Path(home) / shape))
        model = live.build(args.plugin, made)
        with gateway(live.server.grpc_url) as (address, process):
            targets = {
                DIRECT: Target(model, live.server.grpc_url, repository=live.repository),
                THROUGH: Target(model, address, repository=live.repository, api="completions"),
            }
            for row in measure(targets, process, args.rounds):
                table.add_row(*row)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    table.caption = (
        f"* grpc.aio alone; {os.cpu_count()} cores; load of the machine at the end {load}"
    )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
