"""What the gateway costs: a model through it and directly, alternating in one run.

    python -m plugins.tools.bench.gateway [--rounds 5] [--plugin hf] [--shape demo]

Processor time is the gateway's own, as the system counts it. What a chunk costs is the difference
between long and short streams; what a request costs is the rest of the short ones. Next to the
chunk is what `grpc.aio` alone needs to read one of a request's own responses. First tokens are
measured one request at a time, costs with 32 requests in flight, and streams with 1, 8 and 32:
their rate next to that of whole answers, how many tokens a chunk has, and the gap between two.
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
from dataclasses import dataclass, field, replace
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
WHOLE = {
    n: Load(concurrency=n, requests=max(4, 2 * n), warmup=n, options=_TOKENS) for n in (1, 8, 32)
}
STREAMS = {n: replace(load, stream=True) for n, load in WHOLE.items()}
COSTS = Load(concurrency=32, requests=96, warmup=0, stream=True, options=_TOKENS)
RATE = "output_tokens_per_second"
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
    command = [sys.executable, "-m", "plugins.tools.bench.grpc_reader", target.url, target.model]
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
        load = replace(COSTS, options={**_TOKENS, "max_tokens": tokens})
        before = cpu_seconds(process)
        records = run(target, load, plan).records
        seconds.append(cpu_seconds(process) - before)
        chunks.append(sum(len(record.pieces) for record in records))
    chunk = (seconds[1] - seconds[0]) / (chunks[1] - chunks[0])
    return chunk * 1e3, (seconds[0] - chunk * chunks[0]) / len(records) * 1e3


@dataclass
class Measured:
    """The figures of one target, a value for each round."""

    firsts: list[float] = field(default_factory=list)
    streams: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    whole: dict[int, list[float]] = field(default_factory=dict)

    def measure(self, target: Target, plan: Plan) -> None:
        self.firsts.append(figures_of(run(target, FIRST, plan), FIRST)["ttft_p50"] * 1e3)
        for count, load in STREAMS.items():
            figures = figures_of(run(target, load, plan), load)
            self.streams.setdefault(count, []).append(figures)
            rate = figures_of(run(target, WHOLE[count], plan), WHOLE[count])[RATE]
            self.whole.setdefault(count, []).append(rate)

    def rates(self, count: int) -> list[float]:
        return [figures[RATE] for figures in self.streams[count]]

    def cells(self, count: int) -> Iterator[str]:
        """Yield how streams arrive: rate, and as a share of whole answers, chunks, and gaps."""
        found, whole = self.streams[count], self.whole[count]
        yield cell(self.rates(count))
        yield f"{median(a / b for a, b in zip(self.rates(count), whole, strict=True)):.2f}"
        yield f"{median(figures['chunk_tokens'] for figures in found):.1f}"
        for name in ("gap_p50", "gap_p95"):
            yield f"{median(figures[name] for figures in found) * 1e3:.1f}"


def measure(
    targets: dict[str, Target], process: int, rounds: int, console: Console
) -> tuple[dict[str, Measured], dict[str, list[float]]]:
    """Return the figures of both targets, and the gateway's costs."""
    plan = Plan(Prompts())
    measured = {name: Measured() for name in targets}
    spent: dict[str, list[float]] = {"chunk": [], "request": [], "alone": []}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(targets), len(targets)):
            measured[name].measure(targets[name], plan)
        chunk, request = costs(targets[THROUGH], process, plan)
        spent["chunk"].append(chunk)
        spent["request"].append(request)
        spent["alone"].append(reading_alone(targets[DIRECT]))
        console.print(f"round {turn + 1} of {rounds}", style="dim")
    return measured, spent


def overhead(measured: dict[str, Measured], spent: dict[str, list[float]]) -> Iterator[list[str]]:
    """Yield the rows of what the gateway costs."""
    direct, through = measured[DIRECT], measured[THROUGH]
    firsts = list(zip(direct.firsts, through.firsts, strict=True))
    yield ["first token, ms", cell(direct.firsts), cell(through.firsts),
           f"{median(b - a for a, b in firsts):+.1f} ms"]  # fmt: skip
    for label, pair in (
        ("32 streams, tokens/s", (direct.rates(32), through.rates(32))),
        ("32 whole answers, tokens/s", (direct.whole[32], through.whole[32])),
    ):
        ratio = median(b / a for a, b in zip(*pair, strict=True))
        yield [label, *(cell(values) for values in pair), f"{ratio:.2f}"]
    beyond = median(b - a for a, b in zip(spent["alone"], spent["chunk"], strict=True))
    yield ["processor time per chunk, ms", f"{cell(spent['alone'], 3)} *", cell(spent["chunk"], 3),
           f"{beyond:+.3f} ms"]  # fmt: skip
    yield ["processor time per request, ms", "", cell(spent["request"], 2), ""]


def pace(measured: dict[str, Measured], title: str) -> Table:
    """Return the table of how streams arrive."""
    columns = ("tokens/s", "of whole answers", "tokens a chunk", "gap p50, ms", "p95")
    table = Table("", "streams", *columns, title=title)
    for name, figures in measured.items():
        for count in STREAMS:
            table.add_row(name, str(count), *figures.cells(count))
    return table


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
    with tempfile.TemporaryDirectory() as home, LiveTriton.start(Path(home) / "models") as live:
        shape: str = args.shape
        made = shape if shape == "demo" else str(save(shape, "cpu", Path(home) / shape))
        model = live.build(args.plugin, made)
        with gateway(live.server.grpc_url) as (address, process):
            targets = {
                DIRECT: Target(model, live.server.grpc_url, repository=live.repository),
                THROUGH: Target(model, address, repository=live.repository, api="completions"),
            }
            measured, spent = measure(targets, process, args.rounds, Console(stderr=True))
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    caption = f"* grpc.aio alone; {os.cpu_count()} cores; load of the machine at the end {load}"
    table = Table("", DIRECT, THROUGH, "difference", title=title, caption=caption)
    for row in overhead(measured, spent):
        table.add_row(*row)
    Console(width=120).print(pace(measured, title), table)


if __name__ == "__main__":
    main()
