"""``llmserve demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from llmserve.client import Client
    from llmserve.server import Progress

MODEL = "demo"
STREAMED = ("Programming in C++ is like", "The capital of France is")
TOGETHER = (
    "Once upon a time",
    "The weather in Seoul is",
    "A model server is",
    "My favourite food is",
)


@click.command()
@click.option("--max-tokens", type=int, default=48, show_default=True, help="Longest answer.")
def demo(max_tokens: int) -> None:
    """Show the whole way: build the demo model, serve it, ask it, shut down.

    \b
    llmserve demo
    """
    import tempfile

    from llmserve import build, connect
    from llmserve.server import ServerSettings, start
    from llmserve_cli.status import Status

    with (
        tempfile.TemporaryDirectory(prefix="llmserve-demo-") as folder,
        Status("building") as status,
    ):
        repository = Path(folder) / "model_repository"
        result = build("hf", MODEL, output=repository, decoupled=True)
        _told("llmserve build --plugin hf --model demo --set decoupled=true")
        click.echo("  " + ", ".join(sorted(path.name for path in result.folder.iterdir())))
        settings = ServerSettings(repository, http_port=0, grpc_port=0, metrics_port=0)
        with start(settings, on_progress=lambda p: status.say(_step(p))) as server:
            status.stop()
            _told("llmserve serve")
            click.echo(f"  {server.runtime} at {server.http_url}")
            with connect(server.grpc_url) as client:
                for prompt in STREAMED:
                    _stream(client, prompt, max_tokens)
                _ask_together(client, max_tokens)
    click.echo("\nThe server has stopped; nothing is left running.")


def _stream(client: Client, prompt: str, max_tokens: int) -> None:
    _told(f'llmserve query {MODEL} "{prompt}" --stream')
    click.echo(f"  {prompt}", nl=False)
    count = 0
    for piece in client.stream(MODEL, prompt, max_tokens=max_tokens):
        click.echo(click.style(piece.text, fg="green"), nl=False)
        count += 1
    click.echo(f"  ({count} pieces)")


def _ask_together(client: Client, max_tokens: int) -> None:
    _told("four prompts in one request, answered in one batch")
    answers = client.generate(MODEL, TOGETHER, max_tokens=max_tokens)
    for prompt, answer in zip(TOGETHER, answers, strict=True):
        click.echo(f"  {prompt}{click.style(answer.text, fg='green')}")


def _told(command: str) -> None:
    click.echo(
        "\n" + click.style(f"$ {command}" if command.startswith("llm") else command, bold=True)
    )


def _step(progress: Progress) -> str:
    return "loading the model" if progress.loading else "starting Triton"
