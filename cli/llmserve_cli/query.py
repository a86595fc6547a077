"""``llmserve query``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llmserve.client import Client, Completion, Piece


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--url", envvar="LLMSERVE_URL", help="gRPC address, by default 127.0.0.1:8001.")
@click.option("--max-tokens", type=int, help="Longest answer.")
@click.option("--stream/--no-stream", default=None, help="Print pieces as they come, if it can.")
@click.option("--temperature", type=float, help="0 is greedy.")
@click.option("--top-k", type=int, help="Choose among this many tokens.")
@click.option("--top-p", type=float, help="Choose among the likeliest that reach this.")
@click.option("--seed", type=int, help="The same seed gives the same answer.")
@click.option("--stop", multiple=True, help="A word that ends the answer; repeat for several.")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message.")
@click.option("--timeout", type=float, help="Seconds for everything.")
@click.option(
    "--file",
    "prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="One prompt a line; one answer each, in their order.",
)
@click.option(
    "--concurrency", type=click.IntRange(1), default=8, help="Requests at a time (--file)."
)
@click.option("--json", "as_json", is_flag=True, help="Print each answer with its counts.")
def query(
    model: str,
    prompt: str | None,
    url: str | None,
    max_tokens: int | None,
    stream: bool | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    chat: bool,
    timeout: float | None,
    prompts: Path | None,
    concurrency: int,
    as_json: bool,
) -> None:
    """Ask a model and print its answer; the prompt can come from standard input (-).

    \b
    llmserve query demo "Programming in C++ is like"
    llmserve query demo --file prompts.txt --max-tokens 32 --json
    """
    from llmserve.client import connect

    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop_words": list(stop) or None,
    }
    with connect(url, timeout=timeout) as client:
        if prompts:
            if prompt is not None:
                raise click.UsageError("give a prompt or --file, not both")
            _answer_file(client, model, prompts, options, chat, concurrency, as_json)
            return
        text = _read_prompt(prompt)
        if as_json or stream is False:
            _print_answer(client.generate(model, **_asked(text, chat), **options), as_json)
            return
        if stream and client.model(model).exchange == "unary":
            raise click.UsageError(
                f"{model} answers in one piece: leave out --stream, or build it with "
                "--set decoupled=true"
            )
        _print_pieces(client.stream(model, **_asked(text, chat), **options))


def _read_prompt(prompt: str | None) -> str:
    if prompt not in (None, "-"):
        return str(prompt)
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("give a prompt, or - to read it from standard input")
    return sys.stdin.read().rstrip("\n")


def _asked(text: str, chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}


def _print_answer(answer: Completion, as_json: bool) -> None:
    if not as_json:
        click.echo(answer.text)
        return
    import json
    from dataclasses import asdict

    click.echo(json.dumps(asdict(answer), ensure_ascii=False))


def _print_pieces(pieces: Iterator[Piece]) -> None:
    for piece in pieces:
        click.echo(piece.text, nl=False)
        sys.stdout.flush()
    click.echo()


def _answer_file(
    client: Client,
    model: str,
    path: Path,
    options: dict[str, Any],
    chat: bool,
    concurrency: int,
    as_json: bool,
) -> None:
    """Ask several at a time, so that the server can batch; print in the file's order."""
    from concurrent.futures import ThreadPoolExecutor

    texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    with ThreadPoolExecutor(concurrency) as pool:
        answers = pool.map(lambda t: client.generate(model, **_asked(t, chat), **options), texts)
        for answer in answers:
            # One answer a line, whatever is in it.
            _print_answer(answer, True) if as_json else click.echo(" ".join(answer.text.split()))
