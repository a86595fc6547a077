"""What the gateway costs: a model through it, and asked directly, in turns in one run.

    python -m tests.bench.gateway [--rounds 5] [--plugin hf] [--shape demo]

Processor time is the gateway's own, by the system's count; beside it stands what `grpc.aio` takes
by itself to read as many streams. First tokens are asked for one at a time; of all else 32
requests are always under way.
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

from .shapes import SHAPES, save

_TOKENS = {"max_tokens": 64, "ignore_eos": True}
FIRST = Load(concurrency=1, requests=40, stream=True, options={"max_tokens": 4})
STREAMS = Load(concurrency=32, requests=96, warmup=32, stream=True, options=_TOKENS)
WHOLE = Load(concurrency=32, requests=96, warmup=32, options=_TOKENS)
DIRECT, THROUGH = "directly", "through the gateway"


@contextmanager
def gateway(url: str) -> Iterator[tuple[str, int]]:
    """Run a gateway before a Triton; give its address and its process id."""
    command = [sys.executable, "-m", "llmserve_gateway", "--port", "0", "--url", url]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        # Its log, a line for each request, is read by nobody here.
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=log)
        try:
            yield address, process.pid
        finally:
            process.terminate()
            drain.wait()


def cpu_seconds(process: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reading_alone(target: Target) -> float:
    """Return the milliseconds of processor time that reading a message takes `grpc.aio` alone."""
    command = [sys.executable, "-m", "tests.bench.grpc_reader", target.url, target.model]
    env = {**os.environ, **GRPC}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return float(done.stdout)


def measure(targets: dict[str, Target], process: int, rounds: int) -> Iterator[list[str]]:
    """Give the rows of the table."""
    plan = Plan(Prompts())
    firsts, streams, whole = ({name: list[float]() for name in targets} for _ in range(3))
    each, alone = list[float](), list[float]()
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(targets), len(targets)):

            def run(load: Load, target: Target = targets[name]) -> Run:
                found = bench(target, load, plan).runs[0]
                if len(found.good) != load.requests:
                    raise RuntimeError(f"{len(found.records) - len(found.good)} requests failed")
                return found

            firsts[name].append(figures_of(run(FIRST), FIRST)["ttft_p50"] * 1e3)
            before = cpu_seconds(process)
            streamed = run(STREAMS)
            if name == THROUGH:
                chunks = sum(len(record.pieces) for record in streamed.records)
                chunks += (STREAMS.warmup or 0) * chunks // len(streamed.records)
                each.append((cpu_seconds(process) - before) / chunks * 1e3)
                alone.append(reading_alone(targets[DIRECT]))
            rate = "output_tokens_per_second"
            streams[name].append(figures_of(streamed, STREAMS)[rate])
            whole[name].append(figures_of(run(WHOLE), WHOLE)[rate])
    for label, found in (("first token, ms", firsts), ("streams, tokens/s", streams),
                         ("whole answers, tokens/s", whole)):  # fmt: skip
        pairs = list(zip(found[DIRECT], found[THROUGH], strict=True))
        added = median(b - a for a, b in pairs), median(b / a for a, b in pairs)
        difference = f"{added[0]:+.1f} ms" if found is firsts else f"{added[1]:.2f}"
        yield [label, *(cell(values) for values in found.values()), difference]
    beyond = median(b - a for a, b in zip(alone, each, strict=True))
    yield ["processor time a chunk, ms", f"{cell(alone, 3)} *", cell(each, 3), f"{beyond:+.3f} ms"]


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
        f"* grpc.aio alone; {os.cpu_count()} cores; load of the machine in the end {load}"
    )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
