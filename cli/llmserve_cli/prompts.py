"""The prompts of ``llmserve query``: one, from standard input, or many of a file."""

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

# What one prompt can be to blame for; anything else would meet the lines after it as well.
OF_ONE_LINE = (RequestRejectedError, RequestTimeoutError)


@dataclass(frozen=True)
class Line:
    """A prompt and where it stands in its file, counted from 1."""

    number: int
    text: str


def read_prompt(prompt: str | None, model: str) -> str:
    """Return the prompt of the command line, or what standard input has."""
    if prompt not in (None, "-"):
        return str(prompt)
    how = f'llmserve query {model} "Once upon a time"'
    if prompt is None and sys.stdin.isatty():
        raise UsageError("there is no prompt", mend=f"give one, as in {how}, or - to type it")
    text = _decoded(sys.stdin.buffer.read(), "standard input").rstrip("\r\n")
    if not text:
        raise UsageError("standard input is empty", mend=f"write a prompt to it, or {how}")
    return text


def read_lines(path: Path) -> list[Line]:
    """Read a file of prompts, a line each; ``-`` is standard input."""
    if str(path) == "-":
        name, raw = "standard input", sys.stdin.buffer.read()
    else:
        name, raw = str(path), path.read_bytes()
    text = _decoded(raw.removeprefix(b"\xef\xbb\xbf"), name)
    if not text.strip():
        raise UsageError(f"{name} is empty", mend="write a prompt into each line")
    # Not splitlines, which also splits at characters that editors do not count as line ends.
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    return [Line(number, line) for number, line in enumerate(lines, 1)]


def answer_lines(
    client: Client,
    lines: list[Line],
    ask: Callable[[str], Completion],
    concurrency: int,
    show: Callable[[Line, Completion | LLMServeError], None],
) -> int:
    """Send several at a time, so that the server can batch; show each in the file's order.

    A line that is refused is named and the others go on; the exit code is that of the first. A
    blank line is no prompt and no mistake: it keeps its place.
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
            except OF_ONE_LINE as error:
                code = code or error.exit_code
                show(line, error)
                click.echo(f"llmserve: line {line.number}: {error}", err=True)
    except BaseException:
        # What still waits is never sent, and what is under way is cancelled: Python waits for
        # every thread before it ends.
        pool.shutdown(wait=False, cancel_futures=True)
        client.close()
        raise
    return code


def _decoded(raw: bytes, name: str) -> str:
    # Not as the locale has it: what is no text must not travel as something else.
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 text (byte {error.start})", mend="save it as UTF-8"
        ) from None
