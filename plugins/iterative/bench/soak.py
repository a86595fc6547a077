"""A soak on a real Triton: a mixed load, 40 of 100 clients leave, and what is left is looked at.

    python bench/soak.py --seconds 600 [--model demo] [--clients 24] [--set slots=direct]

Prints how memory, sequences and requests stand over time. Exits with 1 if a request failed,
a sequence is left at the end, or memory grew by over 5 % after its first two minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from llmserve.options import parse_assignments
from llmserve.testing import LiveTriton
from llmserve.testing.soak import Moment, Soak

COLUMNS = ("seconds", "model MB", "server MB", "live", "answered", "left", "refused", "failed")


def line(moment: Moment) -> str:
    """Return a moment as a line of the table."""
    values = (
        round(moment.seconds),
        moment.model_memory >> 20,
        moment.server_memory >> 20,
        moment.running,
        moment.answered,
        moment.cancelled,
        moment.refused,
        moment.failed,
    )
    return " ".join(f"{value:>9}" for value in values)


def main() -> int:
    """Run and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    args = parser.parse_args()
    console = Console(highlight=False)
    options = parse_assignments(args.assignments)
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveTriton.start(Path(folder) / "repository") as live,
    ):
        model = live.build("iterative", args.model, **options)
        console.print(" ".join(f"{name:>9}" for name in COLUMNS))
        soak = Soak(live, model, clients=args.clients, seed=args.seed)
        report = soak.run(
            args.seconds,
            every=max(1.0, args.seconds / 20),
            on_moment=lambda moment: console.print(line(moment)),
        )
    if (growth := report.growth()) is not None:
        console.print(f"memory after the first two minutes: {growth:+.1%}")
    for problem in report.problems():
        console.print(problem)
    return 1 if report.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
