"""``llmserve batch``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import click

from llmserve.errors import RequestRejectedError
from llmserve.server import frontend_for
from llmserve_cli.interrupts import stoppable, while_importing

DEFAULT_URL = "http://127.0.0.1:8080/v1"


@click.command()
@click.argument("source", metavar="INPUT", type=click.Path(exists=True, path_type=Path))
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--openai",
    metavar="URL",
    help="Server with OpenAI's API, with the key in OPENAI_API_KEY (default: that of `llmserve "
    f"serve` if it runs here, else {DEFAULT_URL}).",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    default=32,
    show_default=True,
    help="Number of concurrent requests.",
)
@click.option("--in-order", is_flag=True, help="Sort the output as the input, when it is complete.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds for each answer.")
@click.option(
    "--patience",
    type=click.FloatRange(0),
    default=600.0,
    show_default=True,
    help="Seconds for which a request is tried again while the server is full or not reachable.",
)
@click.option("--retry-errors", is_flag=True, help="Ask again what OUTPUT has an error for.")
def batch(
    source: Path,
    output: Path,
    openai: str | None,
    concurrency: int,
    in_order: bool,
    timeout: float | None,
    patience: float,
    retry_errors: bool,
) -> int:
    """Answer a file of requests.

    INPUT is in OpenAI's batch format, one request a line; each line of
    OUTPUT is an answer or an error, as it arrives.

    Run the same command again after an interruption: what OUTPUT has is not asked again, and
    its errors only with --retry-errors.

    \b
    {"custom_id": "1", "method": "POST", "url": "/v1/completions",
     "body": {"model": "demo", "prompt": "Once upon a time", "max_tokens": 32}}

    \b
    llmserve batch requests.jsonl answers.jsonl
    llmserve batch requests.jsonl answers.jsonl --openai https://example.com/v1 --in-order
    """
    with while_importing():
        from llmserve.client import BatchClient, BatchRequests, open_answers

    with closing(BatchRequests(source)) as requests, ExitStack() as stack:
        if openai is None:
            names = [request.model for request in requests.all]
            model = names[0] if names else ""
            openai = frontend_for(model, "openai", "--openai") or DEFAULT_URL
        server = BatchClient(openai, concurrency=concurrency, timeout=timeout, patience=patience)
        # A wrong key or address leaves no file.
        if is_checked := retry_errors or not os.access(output, os.F_OK):
            server.check()
        if retry_errors:
            with open_answers(output, requests) as earlier:
                earlier.drop_failed()
        written = stack.enter_context(open_answers(output, requests))
        total, before = len(requests.all), len(written)
        if before < total and not is_checked:
            server.check()
        try:
            # So that Python 3.11 and later cancel what is being asked, wherever they are.
            with _progress(total, before) as on_line, stoppable():
                server.answer(requests, written, on_line)
        finally:
            if (done := len(written)) < total:
                hint = "run the same command again to continue"
                click.echo(f"[{done} of {total} requests are answered: {hint}]", err=True)
        if in_order:
            written.sort(requests)
        answered = total - written.failed
    click.echo(f"[{answered} of {total} requests are answered, in {output}]", err=True)
    if answered < total:
        problem = f"{total - answered} of {total} requests failed"
        raise RequestRejectedError(
            problem, hint=f"see their errors in {output}; --retry-errors asks again"
        )
    return 0


@contextmanager
def _progress(total: int, before: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show the progress on a terminal: how many, how fast, and how long the others take."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with while_importing():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        Remaining(),
        TextColumn("{task.fields[failed]}"),
    )
    failed = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, completed=before, rate="", failed="")

        def show(line: dict[str, Any]) -> None:
            nonlocal failed
            failed += line["error"] is not None
            speed = progress.tasks[0].speed
            rate = f"{speed:.1f}/s" if speed else ""
            text = f"{failed} failed" if failed else ""
            progress.update(task, advance=1, rate=rate, failed=text)

        yield show
