"""``llmserve query``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import IO, TYPE_CHECKING, Any

import click

from llmserve.commands import asks_a_server, assigned, built_models, print_json
from llmserve.errors import (
    IncompatibleError,
    LLMServeError,
    OptionError,
    RequestTimeoutError,
    UnreachableError,
    UsageError,
)
from llmserve.plugin import is_fingerprint
from llmserve.runtime.contract import GENERATE, IMAGE_URL, OPTIONS, with_images
from llmserve.server import url_for
from llmserve_cli.completion import request_options
from llmserve_cli.interrupts import while_importing
from llmserve_cli.options import request_option
from llmserve_cli.request_assignments import NOT_BY_SET, refuse_unknown
from llmserve_cli.shown_images import url_of_file
from llmserve_cli.terminal import echo_answer

if TYPE_CHECKING:
    from llmserve.client import Client, Completion, Logprob, ModelInfo, Piece
    from llmserve_cli.prompts import Line

SILENT_SECONDS = 20.0
"""Interval for checking that the server still responds, while waiting for an answer."""


@click.command()
@click.argument("model", shell_complete=built_models)
@click.argument("prompt", required=False)
@asks_a_server
@request_option("max_tokens")
@click.option(
    "--stream/--no-stream",
    default=None,
    help="Print the answer as it is generated, or when it is complete.",
)
@request_option("temperature")
@request_option("top_k")
@request_option("top_p")
@request_option("seed")
@request_option("adapter")
@click.option("--stop", multiple=True, help="Text that ends the answer (repeatable).")
@click.option(
    "--logprobs",
    type=click.IntRange(0, int(OPTIONS["logprobs"].high)),
    help="With --json: include log-probabilities, with the N likeliest tokens at each position.",
)
@click.option(
    "--json-schema",
    type=click.File(encoding="utf-8"),
    help="Constrain the answer to the JSON schema in this file.",
)
@click.option("--chat", is_flag=True, help="Send the prompt as a chat message.")
@click.option("--system", metavar="TEXT", help="System message before it; implies --chat.")
@click.option(
    "--image",
    "images",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="An image to ask about, of a model that reads them (repeatable); implies --chat.",
)
@click.option(
    "--suffix", metavar="TEXT", help="What follows: fill in what is between the prompt and it."
)
@click.option("--timeout", type=float, help="Timeout of the whole request in seconds.")
@click.option(
    "--queue-timeout", type=float, help="Timeout in the queue in seconds, if the model allows it."
)
@click.option(
    "--file",
    "prompts",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="Read one prompt per line (- for standard input), and print one answer per line.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=8,
    help="Number of concurrent requests, with --file.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=request_options,
    help="Set any other option of the model (repeatable).",
)
@click.option(
    "--pair",
    "pairs",
    multiple=True,
    metavar="TEXT",
    help="For a model that ranks or classifies: a document, or a second text (repeatable).",
)
@click.option(
    "--npy",
    type=click.Path(dir_okay=False, path_type=Path),
    help="For a model that computes embeddings: write them to this file of numpy.",
)
@click.option(
    "--pin",
    metavar="FINGERPRINT",
    help="Refuse a model whose answers depend on anything else than this, as llmserve list prints.",
)
@click.option("--json", "as_json", is_flag=True, help="Print answers as JSON, with token counts.")
def query(
    model: str,
    prompt: str | None,
    url: str | None,
    repository: Path | None,
    openai: str | None,
    stream: bool | None,
    stop: tuple[str, ...],
    json_schema: IO[str] | None,
    chat: bool,
    system: str | None,
    images: tuple[Path, ...],
    timeout: float | None,
    prompts: Path | None,
    concurrency: int,
    assignments: tuple[str, ...],
    as_json: bool,
    pairs: tuple[str, ...],
    npy: Path | None,
    pin: str | None,
    **options: Any,
) -> int:
    """Query a served model and print its answer.

    A model that computes embeddings, ranks documents or finds labels prints those.

    The prompt is read from standard input if it is missing or -.

    \b
    llmserve query demo "Programming in C++ is like"
    llmserve query demo "What is the capital of Japan?" --system "Answer in one word."
    llmserve query seeing "What is this?" --image photo.jpg
    llmserve query demo --file prompts.txt --max-tokens 32 --json
    llmserve query demo "Once upon a time" --set repetition_penalty=1.2
    llmserve query coder "def add(a, b):" --suffix "print(add(1, 2))"
    llmserve query minilm --file texts.txt --npy vectors.npy
    llmserve query ranker "Where do cats sleep?" --pair "On the sofa." --pair "At noon."
    """
    if stream and (as_json or prompts):
        flag = "--json" if as_json else "--file"
        raise UsageError(f"{flag} prints whole answers", hint="leave out --stream")
    if options["logprobs"] is not None and not as_json:
        raise UsageError("--logprobs needs --json")
    if pin is not None and (openai or not is_fingerprint(pin)):
        what = "--openai has no --pin" if openai else f"{pin} is not a fingerprint"
        raise UsageError(what, hint=f"llmserve list {model} prints one, as passport")
    if options["suffix"] is not None and (chat or system is not None):
        flag = "--chat" if system is None else "--system"
        raise UsageError("--suffix is for a text, not for a message", hint=f"leave out {flag}")
    if prompts and prompt is not None:
        raise UsageError("a prompt and --file cannot be combined", hint="give one of them")
    schema = json_schema.read() if json_schema else None
    if openai and (options["logprobs"] is not None or options["queue_timeout"] is not None):
        raise UsageError("--openai has no --logprobs and no --queue-timeout", hint="use --url")
    options = {"stop_words": list(stop) or None, "json_schema": schema, **options}
    assigned = _assigned(assignments, {k for k, value in options.items() if value is not None})
    options |= assigned
    with while_importing():
        from llmserve.client import OpenAIClient, connect
        from llmserve_cli.prompts import answer_lines, read_lines, read_prompt

        # Sends nothing yet, but imports gRPC and numpy.
        client: Any = (
            OpenAIClient(openai, timeout)
            if openai
            else connect(url_for(model, url, repository), timeout=timeout)
        )
    if openai and (adapter := options.pop("adapter", None)):
        model = f"{model}:{adapter}"
    cut = 0

    urls = [url_of_file(image) for image in images]
    if urls and not openai:
        options[IMAGE_URL.name] = urls

    def content(text: str) -> dict[str, Any]:
        if not chat and system is None and not urls:
            return {"prompt": text}
        first = [] if system is None else [{"role": "system", "content": system}]
        asked = with_images(text, urls, in_parts=bool(openai))
        return {"messages": [*first, {"role": "user", "content": asked}]}

    def ask(text: str) -> Completion:
        answer: Completion = client.generate(model, **content(text), **options)
        return answer

    def show(line: Line, answer: Completion | LLMServeError) -> None:
        # One line for each prompt, answered or not, so that prompts and answers stay aligned.
        if not isinstance(answer, Exception):
            nonlocal cut
            cut += answer.finish_reason == "length"
            _print_answer(answer, as_json, one_line=True)
        elif as_json:
            print_json({"error": str(answer), "line": line.number}, indent=None)
        else:
            click.echo()

    # Servers with OpenAI's API have their own timeouts.
    lines = read_lines(prompts) if prompts else []
    text = "" if prompts else read_prompt(prompt, model)
    with closing(client), nullcontext() if openai else _watched(client):
        if pin is not None and not openai:
            _check_pin(client.model(model), pin)
        if assigned and not openai:
            refuse_unknown(client.model(model), assigned)
        if urls and not openai and not client.model(model).input_of(IMAGE_URL.name):
            raise UsageError(f"{model} reads only text", hint="leave out --image")
        if not openai and (info := client.model(model)).task not in (GENERATE, ""):
            from llmserve_cli.values import Asked, query_values

            texts = [line.text for line in lines] if prompts else [text]
            query_values(client, info, Asked(texts, pairs, options, as_json, npy))
            return 0
        if pairs or npy:
            flag = "--pair" if pairs else "--npy"
            raise UsageError(f"{model} generates text", hint=f"leave out {flag}")
        if prompts:
            code = answer_lines(client, lines, ask, concurrency, show)
            if cut and not as_json:
                answers = "1 answer" if cut == 1 else f"{cut} answers"
                click.echo(f"[{answers} stopped at the limit: --max-tokens]", err=True)
            return code
        if as_json or stream is False:
            answer = ask(text)
            _print_answer(answer, as_json)
            if not as_json:
                _tell_if_cut(answer)
            return 0
        if stream and not openai and client.model(model).exchange == "unary":
            raise UsageError(
                f"{model} answers in one piece",
                hint="leave out --stream, or build it with --set decoupled=true",
            )
        _tell_if_cut(_print_pieces(client.stream(model, **content(text), **options)))
        return 0


@contextmanager
def _watched(client: Client) -> Iterator[None]:
    """Give up when the server stops responding: an open connection does not prove that it works."""
    done, silent = Event(), Event()

    def watch() -> None:
        while not done.wait(SILENT_SECONDS):
            try:
                client.index()
            except (UnreachableError, ValueError):
                return  # The request fails with the same error, or the channel is closed.
            except RequestTimeoutError:
                silent.set()
                client.close()
            except LLMServeError:
                pass  # A server that refuses still responds.

    Thread(target=watch, daemon=True).start()
    try:
        yield
    except LLMServeError:
        if silent.is_set():
            raise UnreachableError(
                "the server no longer answers", hint="look at its log, or restart it"
            ) from None
        raise
    finally:
        done.set()


def _assigned(assignments: tuple[str, ...], taken: set[str]) -> dict[str, Any]:
    """Read ``--set``; it cannot set options that have their own argument."""
    options = assigned(assignments)
    for key in options:
        if key in taken:
            raise OptionError(f"{key} is given twice", hint="leave it out of --set")
        if key in NOT_BY_SET:
            raise OptionError(f"--set cannot set {key}", hint="see `llmserve query --help`")
    return options


def _print_answer(answer: Completion, as_json: bool, *, one_line: bool = False) -> None:
    if as_json:
        print_json(_fields(answer), indent=None)
    else:
        echo_answer(" ".join(answer.text.split()) if one_line else answer.text)


def _print_pieces(pieces: Iterable[Piece]) -> Completion:
    """Print an answer as it arrives, and return all of it."""
    from llmserve.client import Completion

    printed = []
    for piece in pieces:
        echo_answer(piece.text, nl=False)
        sys.stdout.flush()
        printed.append(piece)
    click.echo()
    return Completion.of(printed)


def _tell_if_cut(answer: Completion) -> None:
    """Say that an answer is not complete: it may end in the middle of a sentence."""
    if answer.finish_reason == "length":
        count = answer.output_tokens
        where = "its limit" if count is None else f"{count} token{'s' * (count != 1)}"
        click.echo(f"[stopped at {where}: --max-tokens]", err=True)


def _fields(answer: Completion) -> dict[str, Any]:
    """Return an answer's fields, without optional ones that are empty."""
    fields = asdict(answer)
    if not answer.extra:
        del fields["extra"]
    if not answer.tool_calls:
        del fields["tool_calls"]
    if not answer.reasoning:
        del fields["reasoning"], fields["reasoning_tokens"]
    if answer.logprobs is None:
        del fields["logprobs"]
    else:
        fields["logprobs"] = [_entry(logprob) for logprob in answer.logprobs]
    return fields


def _entry(logprob: Logprob) -> dict[str, Any]:
    entry = {"id": logprob.id, "token": logprob.token, "logprob": logprob.logprob}
    return entry | ({"top": [_entry(other) for other in logprob.top]} if logprob.top else {})


def _check_pin(info: ModelInfo, pin: str) -> None:
    """Refuse a model that is not what it was."""
    if changed := info.changed_since(pin):
        what = " and ".join(part.replace("_", " ") for part in changed)
        raise IncompatibleError(
            f"{info.name} is not the model of that fingerprint: it has other {what}",
            hint=f"its own is {info.fingerprint}" if info.fingerprint else "build it again",
        )
