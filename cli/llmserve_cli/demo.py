"""``llmserve demo``."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from llmserve.client import Client

PROMPTS = ("Programming in C++ is like", "The capital of France is")
RACE = ("Once upon a time", "A model server is")
WAYS = {
    "static": "Static batching: the second prompt waits until the first is done",
    "iterative": "Iterative batching: the second prompt joins while the first goes on",
}


@click.command()
@click.option("--max-tokens", type=int, default=64, show_default=True, help="Longest answer.")
def demo(max_tokens: int) -> None:
    """Show the whole way: build the demo model, serve it, ask it, shut down.

    Two prompts then grow side by side, first in static batches, then in flight.

    \b
    llmserve demo
    """
    import tempfile
    from pathlib import Path

    from llmserve import build, connect
    from llmserve.server import ServerSettings, start
    from llmserve_cli.ending import end_in_order
    from llmserve_cli.race import run_race, show_race
    from llmserve_cli.status import Status

    end_in_order(signal.SIGTERM)
    with tempfile.TemporaryDirectory(prefix="llmserve-demo-") as folder:
        repository = Path(folder) / "model_repository"
        with Status("building") as status:
            for batching in WAYS:
                build("iterative", "demo", name=batching, output=repository, batching=batching)
                _heading(f"$ llmserve build --plugin iterative --model demo --batching {batching}")
            settings = ServerSettings(repository, http_port=0, grpc_port=0, metrics_port=0)
            server = start(settings, on_progress=lambda p: status.say(str(p)))
        with server, connect(server.grpc_url) as client:
            _heading("$ llmserve serve")
            click.echo(f"  {server.runtime} at {server.http_url}")
            for prompt in PROMPTS:
                _stream(client, prompt, max_tokens)
            for batching, title in WAYS.items():
                _heading(title)
                show_race(RACE, run_race(client, batching, RACE, max_tokens))
    click.echo("\nThe server has stopped; nothing is left running.")


def _stream(client: Client, prompt: str, max_tokens: int) -> None:
    _heading(f'$ llmserve query iterative "{prompt}"')
    click.echo(f"  {prompt}", nl=False)
    for piece in client.stream("iterative", prompt, max_tokens=max_tokens):
        click.echo(click.style(piece.text, fg="green"), nl=False)
    click.echo()


def _heading(text: str) -> None:
    click.echo("\n" + click.style(text, bold=True))
