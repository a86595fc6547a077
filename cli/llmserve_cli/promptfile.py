"""``llmserve query --file``: many prompts at a time, answers in the file's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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


def read_lines(path: Path) -> list[Line]:
    """Read a file of prompts; empty lines are none, but they count."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start})", mend="save it as UTF-8"
        ) from None
    # Not splitlines, which also splits at characters that editors do not count as line ends.
    lines = [Line(number, line) for number, line in enumerate(text.split("\n"), 1)]
    return [line for line in lines if line.text.strip()]


def answer_lines(
    client: Client,
    lines: list[Line],
    ask: Callable[[str], Completion],
    concurrency: int,
    show: Callable[[Line, Completion | LLMServeError], None],
) -> int:
    """Ask several at a time, so that the server can batch; show each in the file's order.

    A line that is refused is told and the others go on; the exit code is that of the first.
    """
    code = 0
    with _pool(client, concurrency) as pool:
        asked: list[tuple[Line, Future[Completion]]] = [
            (line, pool.submit(ask, line.text)) for line in lines
        ]
        for line, future in asked:
            try:
                show(line, future.result())
            except OF_ONE_LINE as error:
                code = code or error.exit_code
                show(line, error)
                click.echo(f"llmserve: line {line.number}: {error}", err=True)
    return code


@contextmanager
def _pool(client: Client, concurrency: int) -> Iterator[ThreadPoolExecutor]:
    """Lend threads; when the block is left early, what still waits is never asked."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        # Cancels what is under way, for Python waits for every thread before it ends.
        client.close()
        raise
    pool.shutdown()
