"""The prompts of ``llmserve query``: a single one, or one per line of a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmserve.errors import LLMServeError, RequestRejectedError, RequestTimeoutError, UsageError

if TYPE_CHECKING:
    from llmserve.client import Client, Completion

# Errors that one prompt can cause; any other would affect the following lines too.
LINE_ERRORS = (RequestRejectedError, RequestTimeoutError)


@dataclass(frozen=True)
class Line:
    """A prompt and its line number, counted from 1."""

    number: int
    text: str


def read_prompt(prompt: str | None, model: str) -> str:
    """Return the prompt of the command line, or of standard input."""
    if prompt not in (None, "-"):
        return str(prompt)
    example = f'llmserve query {model} "Once upon a time"'
    if prompt is None and sys.stdin.isatty():
        raise UsageError("there is no prompt", hint=f"give one, as in {example}, or - to type it")
    text = _decoded(sys.stdin.buffer.read(), "standard input").rstrip("\r\n")
    if not text:
        raise UsageError("standard input is empty", hint=f"write a prompt to it, or run {example}")
    return text


def read_lines(path: Path) -> list[Line]:
    """Read a file with one prompt per line; ``-`` is standard input."""
    if str(path) == "-":
        name, raw = "standard input", sys.stdin.buffer.read()
    else:
        name, raw = str(path), path.read_bytes()
    text = _decoded(raw.removeprefix(b"\xef\xbb\xbf"), name)
    if not text.strip():
        raise UsageError(f"{name} is empty", hint="write one prompt per line")
    # Not splitlines(), which also splits at characters that editors do not treat as line ends.
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    return [Line(number, line) for number, line in enumerate(lines, 1)]


def answer_lines(
    client: Client,
    lines: list[Line],
    ask: Callable[[str], Completion],
    concurrency: int,
    show: Callable[[Line, Completion | LLMServeError], None],
) -> int:
    """Send several prompts concurrently, so that the server can batch; show answers in order.

    A refused line is reported and the others continue; the exit code is that of the first such
    line. A blank line is not sent and not an error: it keeps its place in the output.
    """
    code = 0
    pool = ThreadPoolExecutor(concurrency)
    try:
        answers: list[tuple[Line, Future[Completion] | None]] = [
            (line, pool.submit(ask, line.text) if line.text.strip() else None) for line in lines
        ]
        for line, answer in answers:
            try:
                show(line, answer.result() if answer else UsageError("the line is blank"))
            except LINE_ERRORS as error:
                code = code or error.exit_code
                show(line, error)
                click.echo(f"llmserve: line {line.number}: {error}", err=True)
    except BaseException:
        # Prompts that still wait are never sent, and those in flight are cancelled: at exit, Python
        # waits for all threads.
        pool.shutdown(wait=False, cancel_futures=True)
        client.close()
        raise
    return code


def _decoded(raw: bytes, name: str) -> str:
    # Not in the encoding of the locale: bytes that are not UTF-8 must not be sent as other text.
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 text (byte {error.start})", hint="save it as UTF-8"
        ) from None
