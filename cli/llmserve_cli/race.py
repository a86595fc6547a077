"""Two prompts side by side: asked one shortly after the other, then shown as they grew."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from llmserve.client import Client

SHOWN_SECONDS = 4.0


@dataclass(frozen=True)
class Grown:
    """A piece of an answer: when it came, which prompt it belongs to, what it says."""

    at: float
    lane: int
    text: str


def run_race(client: Client, model: str, prompts: Sequence[str], max_tokens: int) -> list[Grown]:
    """Ask each prompt when the one before it has its first piece; return what came when."""
    started = [Event() for _ in prompts]
    grown: list[Grown] = []
    client.generate(model, prompts[0], max_tokens=1)
    began = time.perf_counter()

    def ask(lane: int) -> None:
        if lane:
            started[lane - 1].wait(timeout=30)
        try:
            for piece in client.stream(model, prompts[lane], max_tokens=max_tokens):
                grown.append(Grown(time.perf_counter() - began, lane, piece.text))
                started[lane].set()
        finally:
            started[lane].set()

    with ThreadPoolExecutor(len(prompts)) as pool:
        for lane in [pool.submit(ask, lane) for lane in range(len(prompts))]:
            lane.result()
    return sorted(grown, key=lambda piece: piece.at)


def show_race(prompts: Sequence[str], grown: Sequence[Grown]) -> None:
    """Show a race on a terminal, slowly enough to be seen, and its times anywhere."""
    if sys.stdout.isatty():
        _replay(prompts, grown)
    for lane, prompt in enumerate(prompts):
        times = [piece.at for piece in grown if piece.lane == lane]
        click.echo(
            f"  {prompt!r}: first piece after {times[0]:.2f} s, done after {times[-1]:.2f} s"
        )


def _replay(prompts: Sequence[str], grown: Sequence[Grown]) -> None:
    from rich.console import Console
    from rich.live import Live

    slower = max(1.0, SHOWN_SECONDS / grown[-1].at)
    console = Console()
    texts = [""] * len(prompts)
    # Room for the whole from the beginning, so that the table does not jump.
    whole = ["".join(p.text for p in grown if p.lane == lane) for lane in range(len(prompts))]
    height = max(
        len(p + t) // max(1, console.width // len(prompts) - 6)
        for p, t in zip(prompts, whole, strict=True)
    )
    with Live(
        _table(prompts, texts, slower, height), console=console, refresh_per_second=30
    ) as live:
        began = time.perf_counter()
        for piece in grown:
            time.sleep(max(0.0, began + piece.at * slower - time.perf_counter()))
            texts[piece.lane] += piece.text
            live.update(_table(prompts, texts, slower, height))


def _table(prompts: Sequence[str], texts: Sequence[str], slower: float, height: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, expand=True, caption=f"shown {slower:.0f} times slower")
    cells = []
    for prompt, text in zip(prompts, texts, strict=True):
        table.add_column(ratio=1)
        cells.append(
            Text.assemble((prompt, "bold"), (text, "green"), "\n" * (0 if text else height))
        )
    table.add_row(*cells)
    return table
