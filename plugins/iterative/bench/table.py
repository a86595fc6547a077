"""One table of what the plugin is measured by: both sides in turns, in one run.

    python plugins/iterative/bench/table.py [--only process,context,triton] [--rounds 5]
        [--dtype float32] [--device cpu] [--shape 92m]

The model is of a known shape with random weights; every prompt is a new one, on both sides.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from inprocess import engine_rate, generate_batch_rate, generate_rate, make_engine, step_seconds
from rich.console import Console
from rich.table import Table
from served import Served
from shapes import Prompts, make_model, save

Side = Callable[[], float]
BATCHES = (1, 8, 32)


def in_turns(label: str, ours: Side, theirs: Side, rounds: int) -> tuple[str, ...]:
    """Measure both so many times each, the first place changing hands; one round warms up."""
    ours()
    theirs()
    pairs = []
    for turn in range(rounds):
        if turn % 2:
            first = ours()
            pairs.append((first, theirs()))
        else:
            second = theirs()
            pairs.append((ours(), second))
    ratios = sorted(a / b for a, b in pairs)
    cells = (median(a for a, _ in pairs), median(b for _, b in pairs))
    return (
        label,
        *(f"{cell:.3g}" for cell in cells),
        f"{median(ratios):.2f}",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
    )


def in_process(args: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """The engine against transformers, in this process."""
    engine = make_engine(make_model(args.shape, args.dtype, args.device))
    reference = make_model(args.shape, args.dtype, args.device)
    prompts = Prompts()
    for rows in BATCHES:
        yield in_turns(
            f"engine against generate(), {rows} at a time, tokens/s",
            partial(_engine_rate, engine, prompts, rows),
            partial(_generate_rate, reference, prompts, rows),
            args.rounds,
        )
    yield in_turns(
        "engine against generate_batch(), 32 requests, tokens/s",
        lambda: engine_rate(engine, prompts.ids(32)),
        lambda: generate_batch_rate(reference, prompts.ids(32)),
        args.rounds,
    )


def context(args: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """A step of one sequence after 900 tokens against one after 60."""
    engine = make_engine(make_model(args.shape, args.dtype, args.device))
    yield in_turns(
        "a step at context 900 against one at 60, ms",
        lambda: step_seconds(engine, 900) * 1e3,
        lambda: step_seconds(engine, 60) * 1e3,
        args.rounds,
    )


def through_triton(args: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """The plugin through Triton against ``generate()`` in process."""
    prompts = Prompts()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save(args.shape, args.device, Path(folder) / "model")
        reference = make_model(args.shape, args.dtype, args.device)
        with Served.start(Path(folder), checkpoint, args.dtype, args.device) as served:
            for rows in BATCHES:
                yield in_turns(
                    f"through Triton against generate() in process, {rows} at a time, tokens/s",
                    partial(_served_rate, served, prompts, rows),
                    partial(_generate_rate, reference, prompts, rows),
                    args.rounds,
                )


def _engine_rate(engine: Any, prompts: Prompts, rows: int) -> float:
    return engine_rate(engine, prompts.ids(rows))


def _generate_rate(model: Any, prompts: Prompts, rows: int) -> float:
    return generate_rate(model, prompts.ids(rows))


def _served_rate(served: Served, prompts: Prompts, rows: int) -> float:
    return served.rate(prompts.texts(rows))


PARTS = {"process": in_process, "context": context, "triton": through_triton}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=("92m", "1b", "7b"), default="92m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    table = Table(
        *("figure", "ours", "theirs", "ratio (median)", "range"),
        title=f"{args.shape}, {args.dtype}, {args.device}, {args.rounds} rounds each",
        caption=f"{platform.machine()}, {threads}, torch {torch.__version__}",
    )
    progress = Console(stderr=True, width=140)
    for name in args.only.split(","):
        for row in PARTS[name](args):
            table.add_row(*row)
            progress.print("; ".join(row), style="dim")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
