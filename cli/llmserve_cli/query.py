"""``llmserve query``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llmserve.client import Client, Completion, Piece
    from llmserve.client.results import Logprob
    from llmserve.errors import LLMServeError


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
@click.option(
    "--logprobs",
    type=click.IntRange(0, 20),
    help="With --json: log-probabilities of the tokens and of so many others at each place.",
)
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message.")
@click.option("--timeout", type=float, help="Seconds for everything.")
@click.option("--queue-timeout", type=float, help="Seconds to wait for a turn, if it takes that.")
@click.option(
    "--file",
    "prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="One prompt a line; one answer a line, empty if refused.",
)
@click.option(
    "--concurrency", type=click.IntRange(1), default=8, help="Requests at a time (--file)."
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any other option that the model takes.",
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
    logprobs: int | None,
    chat: bool,
    timeout: float | None,
    queue_timeout: float | None,
    prompts: Path | None,
    concurrency: int,
    assignments: tuple[str, ...],
    as_json: bool,
) -> int:
    """Ask a model and print its answer; the prompt can come from standard input (-).

    \b
    llmserve query demo "Programming in C++ is like"
    llmserve query demo --file prompts.txt --max-tokens 32 --json
    llmserve query demo "Once upon a time" --set repetition_penalty=1.2
    """
    from llmserve.client import connect

    if stream and (as_json or prompts):
        raise click.UsageError(
            f"{'--json' if as_json else '--file'} gives whole answers: leave out --stream"
        )
    if logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json")
    if prompts and prompt is not None:
        raise click.UsageError("give a prompt or --file, not both")

    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop_words": list(stop) or None,
        "logprobs": logprobs,
        "queue_timeout": queue_timeout,
    }
    options |= _assigned(assignments, {k for k, value in options.items() if value is not None})
    with connect(url, timeout=timeout) as client:
        if prompts:
            return _answer_file(client, model, prompts, options, chat, concurrency, as_json)
        text = _read_prompt(prompt)
        if as_json or stream is False:
            answer = client.generate(model, **_asked(text, chat), **options)
            _print_json(_told(answer)) if as_json else click.echo(answer.text)
            return 0
        if stream and client.model(model).exchange == "unary":
            raise click.UsageError(
                f"{model} answers in one piece: leave out --stream, or build it with "
                "--set decoupled=true"
            )
        _print_pieces(client.stream(model, **_asked(text, chat), **options))
        return 0


def _read_prompt(prompt: str | None) -> str:
    if prompt not in (None, "-"):
        return str(prompt)
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("give a prompt, or - to read it from standard input")
    try:
        # Not as the locale has it: what is no text must not travel as something else.
        return sys.stdin.buffer.read().decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise click.UsageError("standard input is not UTF-8 text") from None


def _assigned(assignments: tuple[str, ...], taken: set[str]) -> dict[str, Any]:
    """Read ``--set``; what has an argument of its own is given by that."""
    from llmserve.errors import OptionError
    from llmserve.options import parse_assignments

    options = parse_assignments(assignments)
    for key in options:
        if key in taken:
            raise OptionError(f"{key} is given twice", mend="leave it out of --set")
        if key in ("self", "model", "prompt", "messages", "stream", "timeout"):
            raise OptionError(f"--set cannot give {key}", mend="see `llmserve query --help`")
    return {key: _value(text) for key, text in options.items()}


def _value(text: str) -> bool | int | float | str:
    """Take numbers, true and false for what they are, and anything else for text."""
    import json

    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float)) else text


def _asked(text: str, chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}


def _print_json(content: dict[str, Any]) -> None:
    import json

    click.echo(json.dumps(content, ensure_ascii=False))


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
) -> int:
    from llmserve_cli.promptfile import Line, answer_lines, read_lines

    def ask(text: str) -> Completion:
        answer: Completion = client.generate(model, **_asked(text, chat), **options)
        return answer

    def show(line: Line, answer: Completion | LLMServeError) -> None:
        # One line for each prompt, whatever came of it, so that they stay side by side.
        if isinstance(answer, Exception):
            refused = {"error": str(answer), "line": line.number}
            _print_json(refused) if as_json else click.echo()
        elif as_json:
            _print_json(_told(answer))
        else:
            click.echo(" ".join(answer.text.split()))

    return answer_lines(client, read_lines(path), ask, concurrency, show)


def _told(answer: Completion) -> dict[str, Any]:
    """Return an answer's fields; what was not asked for or is not told is left out."""
    told = asdict(answer)
    if not answer.extra:
        del told["extra"]
    if answer.logprobs is None:
        del told["logprobs"]
    else:
        told["logprobs"] = [_entry(one) for one in answer.logprobs]
    return told


def _entry(one: Logprob) -> dict[str, Any]:
    entry = {"id": one.id, "token": one.token, "logprob": one.logprob}
    return entry | ({"top": [_entry(other) for other in one.top]} if one.top else {})
