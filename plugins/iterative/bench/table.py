"""One table of what the plugin is measured by: ours and theirs in turns, in one run.

    python plugins/iterative/bench/table.py [--only generate,step] [--quick]
        [--ctranslate2-python PATH] [--openvino-python PATH]
        [--device cuda --shape 1b]

The model is of a known shape with random weights. CTranslate2 and OpenVINO GenAI run in
Pythons of their own: ``pip install ctranslate2 transformers torch`` in one environment and
``pip install optimum-intel openvino-genai openvino-tokenizers nncf`` in another.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from machine import conditions
from rich.console import Console
from rich.table import Table
from rounds import Line, Skipped
from rows import ROWS
from stage import Stage, Wishes

_COLUMNS = ("figure", "ours", "theirs", "ratio (median)", "range", "to reach", "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = _parser().parse_args(arguments)
    wishes = Wishes(
        args.shape,
        args.dtype,
        args.device,
        args.rounds or (2 if args.quick else 5),
        args.quick,
        args.ctranslate2_python,
        args.openvino_python,
    )
    console, told = Console(width=140), Console(width=140, stderr=True)
    found: list[Line | Skipped] = []
    with ExitStack() as stack:
        stage = Stage(wishes, stack)
        for name in args.only:
            for line in ROWS[name](stage):
                found.append(line)
                # At once as well, so that a run which is broken off has told something.
                told.print("; ".join(filter(None, line.cells())), style="dim")
    title = f"{args.shape} shape, {args.dtype}, {args.device}, {wishes.rounds} rounds each"
    table = Table(*_COLUMNS, title=title, caption=conditions())
    for line in found:
        table.add_row(*line.cells())
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_names, default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter loads")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--shape", choices=("92m", "1b", "7b"), default="92m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ctranslate2-python", type=Path)
    parser.add_argument("--openvino-python", type=Path)
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise argparse.ArgumentTypeError(f"no row {unknown[0]}: there are {', '.join(ROWS)}")
    return names


if __name__ == "__main__":
    main()
