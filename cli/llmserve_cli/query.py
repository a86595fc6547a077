"""``llmserve query``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import IO, TYPE_CHECKING, Any

import click

from llmserve.errors import (
    LLMServeError,
    OptionError,
    RequestTimeoutError,
    UnreachableError,
    UsageError,
)
from llmserve.names import near
from llmserve_cli.completion import built_models
from llmserve_cli.interrupts import while_importing
from llmserve_cli.terminal import echo_answer, print_json

if TYPE_CHECKING:
    from llmserve.client import Client, Completion, ModelInfo, Piece
    from llmserve.client.results import Logprob
    from llmserve_cli.prompts import Line

SILENT_SECONDS = 20.0
"""How often to check that the server still responds, while waiting for an answer."""
_NOT_BY_SET = {"self", "model", "prompt", "text_input", "messages", "stream", "timeout"}


@click.command()
@click.argument("model", shell_complete=built_models)
@click.argument("prompt", required=False)
@click.option("--url", envvar="LLMSERVE_URL", help="gRPC address, by default 127.0.0.1:8001.")
@click.option(
    "--openai",
    metavar="URL",
    help="Ask a server that speaks OpenAI's API, as in http://127.0.0.1:8080/v1; a key is read "
    "from OPENAI_API_KEY.",
)
@click.option("--max-tokens", type=int, help="Longest answer.")
@click.option(
    "--stream/--no-stream",
    default=None,
    help="Print the answer while it is generated, or at its end.",
)
@click.option("--temperature", type=float, help="0 is greedy.")
@click.option("--top-k", type=int, help="Sample from this many tokens.")
@click.option(
    "--top-p", type=float, help="Sample from the likeliest tokens up to this probability."
)
@click.option("--seed", type=int, help="The same seed gives the same answer.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be repeated.")
@click.option(
    "--logprobs",
    type=click.IntRange(0, 20),
    help="With --json: log-probabilities, and those of the N likeliest tokens at each position.",
)
@click.option(
    "--json-schema",
    type=click.File(encoding="utf-8"),
    help="Hold the answer to the JSON schema in this file.",
)
@click.option("--chat", is_flag=True, help="Send the prompt as a chat message.")
@click.option("--timeout", type=float, help="Seconds for the whole request.")
@click.option(
    "--queue-timeout", type=float, help="Seconds to wait in the queue, where the model allows it."
)
@click.option(
    "--file",
    "prompts",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="A prompt per line (- reads standard input); prints an answer per line.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=8,
    help="Requests at the same time, with --file.",
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
    openai: str | None,
    stream: bool | None,
    stop: tuple[str, ...],
    json_schema: IO[str] | None,
    chat: bool,
    timeout: float | None,
    prompts: Path | None,
    concurrency: int,
    assignments: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> int:
    """Ask a served model and print its answer.

    The prompt can come from standard input (-).

    \b
    llmserve query demo "Programming in C++ is like"
    llmserve query demo --file prompts.txt --max-tokens 32 --json
    llmserve query demo "Once upon a time" --set repetition_penalty=1.2
    """
    if stream and (as_json or prompts):
        flag = "--json" if as_json else "--file"
        raise UsageError(f"{flag} gives whole answers", mend="leave out --stream")
    if options["logprobs"] is not None and not as_json:
        raise UsageError("--logprobs needs --json")
    if prompts and prompt is not None:
        raise UsageError("a prompt and --file", mend="give one of them, not both")
    schema = json_schema.read() if json_schema else None
    if openai and (options["logprobs"] is not None or options["queue_timeout"] is not None):
        raise UsageError("--openai knows no --logprobs and no --queue-timeout", mend="use --url")
    options = {"stop_words": list(stop) or None, "json_schema": schema, **options}
    assigned = _assigned(assignments, {k for k, value in options.items() if value is not None})
    options |= assigned
    with while_importing():
        from llmserve.client import connect
        from llmserve_cli.openai_client import OpenAIClient
        from llmserve_cli.prompts import answer_lines, read_lines, read_prompt

        # Sends nothing yet, but imports gRPC and numpy.
        client: Any = OpenAIClient(openai, timeout) if openai else connect(url, timeout=timeout)

    def ask(text: str) -> Completion:
        answer: Completion = client.generate(model, **_content(text, chat), **options)
        return answer

    def show(line: Line, answer: Completion | LLMServeError) -> None:
        # A line for each, whatever came of it, so that prompts and answers stay side by side.
        if not isinstance(answer, Exception):
            _print_answer(answer, as_json, one_line=True)
        elif as_json:
            print_json({"error": str(answer), "line": line.number}, indent=None)
        else:
            click.echo()

    # What speaks OpenAI's API has time-outs of its own.
    with closing(client), nullcontext() if openai else _watched(client):
        if assigned and not openai:
            _refuse_unread(client.model(model), assigned)
        if prompts:
            return answer_lines(client, read_lines(prompts), ask, concurrency, show)
        text = read_prompt(prompt, model)
        if as_json or stream is False:
            _print_answer(ask(text), as_json)
            return 0
        if stream and not openai and client.model(model).exchange == "unary":
            raise UsageError(
                f"{model} answers in one piece",
                mend="leave out --stream, or build it with --set decoupled=true",
            )
        _print_pieces(client.stream(model, **_content(text, chat), **options))
        return 0


@contextmanager
def _watched(client: Client) -> Iterator[None]:
    """Give up when the server stops responding; an open connection is no proof that it works."""
    done, silent = Event(), Event()

    def watch() -> None:
        while not done.wait(SILENT_SECONDS):
            try:
                client.index()
            except (UnreachableError, ValueError):
                return  # The request fails with the same, or has ended and its channel is closed.
            except RequestTimeoutError:
                silent.set()
                client.close()
            except LLMServeError:
                pass  # A refusal is an answer too.

    Thread(target=watch, daemon=True).start()
    try:
        yield
    except LLMServeError:
        if silent.is_set():
            raise UnreachableError(
                "the server no longer answers", mend="look at its log, or start it again"
            ) from None
        raise
    finally:
        done.set()


def _assigned(assignments: tuple[str, ...], taken: set[str]) -> dict[str, Any]:
    """Read ``--set``; what has an argument of its own is given by that."""
    from llmserve.options import parse_assignments

    options = parse_assignments(assignments)
    for key in options:
        if key in taken:
            raise OptionError(f"{key} is given twice", mend="leave it out of --set")
        if key in _NOT_BY_SET:
            raise OptionError(f"--set cannot give {key}", mend="see `llmserve query --help`")
    return {key: _value(text) for key, text in options.items()}


def _refuse_unread(info: ModelInfo, options: Iterable[str]) -> None:
    """Refuse what a model of llmserve's has no input for, and nobody would read."""
    from llmserve.client.messages import input_of

    for name in options:
        known = input_of(info, name) or name in ("priority", "queue_timeout")
        if info.made_by_llmserve and not known:
            mend = near(name, info.inputs.keys() - _NOT_BY_SET)
            raise OptionError(f"{info.name} takes no {name}", mend=mend)


def _value(text: str) -> bool | int | float | str:
    """Take numbers, true and false for what they are, and anything else for text."""
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float)) else text


def _content(text: str, chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}


def _print_answer(answer: Completion, as_json: bool, *, one_line: bool = False) -> None:
    if as_json:
        print_json(_fields(answer), indent=None)
    else:
        echo_answer(" ".join(answer.text.split()) if one_line else answer.text)


def _print_pieces(pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        echo_answer(piece.text, nl=False)
        sys.stdout.flush()
    click.echo()


def _fields(answer: Completion) -> dict[str, Any]:
    """Return an answer's fields, without those that hold nothing."""
    fields = asdict(answer)
    if not answer.extra:
        del fields["extra"]
    if not answer.tool_calls:
        del fields["tool_calls"]
    if answer.logprobs is None:
        del fields["logprobs"]
    else:
        fields["logprobs"] = [_entry(one) for one in answer.logprobs]
    return fields


def _entry(one: Logprob) -> dict[str, Any]:
    entry = {"id": one.id, "token": one.token, "logprob": one.logprob}
    return entry | ({"top": [_entry(other) for other in one.top]} if one.top else {})
