"""``llmserve demo``."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING

import click

from llmserve_cli.interrupts import raise_on_interrupt, while_importing

if TYPE_CHECKING:
    from rich.table import Table

    from llmserve.client import Client

PROMPTS = ("Programming in C++ is like", "The capital of France is")
SIDE_BY_SIDE = ("Once upon a time", "A model server is")
BATCHINGS = {
    "static": "Static batching: the second prompt waits until the first is done",
    "iterative": "Iterative batching: the second prompt joins while the first goes on",
}
REPLAY_SECONDS = 4.0


@dataclass(frozen=True)
class Arrival:
    """A piece of an answer: its arrival time, the index of its prompt, and its text."""

    time: float
    lane: int
    text: str


@click.command()
@click.option("--max-tokens", type=int, default=64, show_default=True, help="Maximum tokens.")
def demo(max_tokens: int) -> None:
    """Build, serve and query a small model.

    It also shows two answers side by side, first with static batching, then with in-flight
    batching. It leaves nothing running and nothing on disk.

    \b
    llmserve demo
    """
    with while_importing():
        import tempfile
        from pathlib import Path

        from llmserve import build, connect
        from llmserve.commands import Status
        from llmserve.server import ServerSettings, start

    raise_on_interrupt(signal.SIGTERM)
    with tempfile.TemporaryDirectory(prefix="llmserve-demo-") as folder:
        repository = Path(folder) / "model_repository"
        with Status("building") as status:
            for batching in BATCHINGS:
                build("iterative", "demo", name=batching, output=repository, batching=batching)
                _heading(f"$ llmserve build --plugin iterative --model demo --batching {batching}")
            settings = ServerSettings(repository, http_port=0, grpc_port=0, metrics_port=0)
            server = start(settings, on_progress=lambda p: status.update(str(p)))
        with server, connect(server.grpc_url) as client:
            _heading("$ llmserve serve")
            click.echo(f"  {server.runtime} at {server.http_url}")
            for prompt in PROMPTS:
                _stream(client, prompt, max_tokens)
            for batching, title in BATCHINGS.items():
                _heading(title)
                _show(SIDE_BY_SIDE, stream_together(client, batching, SIDE_BY_SIDE, max_tokens))
    click.echo("\nThe server has stopped; nothing is left running.")


def stream_together(
    client: Client, model: str, prompts: Sequence[str], max_tokens: int
) -> list[Arrival]:
    """Send each prompt when the previous one has its first piece; return all arrivals."""
    from concurrent.futures import ThreadPoolExecutor

    started = [Event() for _ in prompts]
    arrivals: list[Arrival] = []
    client.generate(model, prompts[0], max_tokens=1)
    start = time.perf_counter()

    def send(lane: int) -> None:
        if lane:
            started[lane - 1].wait(timeout=30)
        try:
            for piece in client.stream(model, prompts[lane], max_tokens=max_tokens):
                arrivals.append(Arrival(time.perf_counter() - start, lane, piece.text))
                started[lane].set()
        finally:
            started[lane].set()

    with ThreadPoolExecutor(len(prompts)) as pool:
        for job in [pool.submit(send, lane) for lane in range(len(prompts))]:
            job.result()
    return sorted(arrivals, key=lambda piece: piece.time)


def _stream(client: Client, prompt: str, max_tokens: int) -> None:
    _heading(f'$ llmserve query iterative "{prompt}"')
    click.echo(f"  {prompt}", nl=False)
    for piece in client.stream("iterative", prompt, max_tokens=max_tokens):
        click.echo(click.style(piece.text, fg="green"), nl=False)
    click.echo()


def _heading(text: str) -> None:
    click.echo("\n" + click.style(text, bold=True))


def _show(prompts: Sequence[str], arrivals: Sequence[Arrival]) -> None:
    """Print the times of answers; on a terminal, first replay them in slow motion."""
    if sys.stdout.isatty():
        _replay(prompts, arrivals)
    for lane, prompt in enumerate(prompts):
        times = [piece.time for piece in arrivals if piece.lane == lane]
        click.echo(
            f"  {prompt!r}: first piece after {times[0]:.2f} s, done after {times[-1]:.2f} s"
        )


def _replay(prompts: Sequence[str], arrivals: Sequence[Arrival]) -> None:
    from rich.console import Console
    from rich.live import Live

    slowdown = max(1.0, REPLAY_SECONDS / arrivals[-1].time)
    console = Console()
    texts = [""] * len(prompts)
    # At its final height from the start, so that the table does not jump.
    width = max(1, console.width // len(prompts) - 6)
    lengths = [sum(len(p.text) for p in arrivals if p.lane == lane) for lane in range(len(prompts))]
    height = max(len(p) + length for p, length in zip(prompts, lengths, strict=True)) // width
    with Live(console=console, refresh_per_second=30) as live:
        start = time.perf_counter()
        for piece in arrivals:
            time.sleep(max(0.0, start + piece.time * slowdown - time.perf_counter()))
            texts[piece.lane] += piece.text
            live.update(_table(prompts, texts, slowdown, height))


def _table(prompts: Sequence[str], texts: Sequence[str], slowdown: float, height: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, expand=True, caption=f"shown {slowdown:.0f} times slower")
    cells = []
    for prompt, text in zip(prompts, texts, strict=True):
        table.add_column(ratio=1)
        cells.append(
            Text.assemble((prompt, "bold"), (text, "green"), "\n" * (0 if text else height))
        )
    table.add_row(*cells)
    return table
