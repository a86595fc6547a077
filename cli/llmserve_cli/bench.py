"""``llmserve bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmserve_cli.loads import load_options

if TYPE_CHECKING:
    from llmserve.errors import LLMServeError
    from llmserve.measure.bench import Target
    from llmserve.measure.plan import Prompts
    from llmserve.measure.runs import Run

_OUT = click.Path(dir_okay=False, path_type=Path, allow_dash=True)
_REQUESTS = 64


@click.command()
@click.argument("model")
@click.option("--url", envvar="LLMSERVE_URL", help="gRPC address, by default 127.0.0.1:8001.")
@click.option("--concurrency", type=click.IntRange(1), help="Requests under way, by default 1.")
@load_options
@click.option(
    "--repository",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("model_repository"),
    show_default=True,
    help="Where the model's tokenizer may be read.",
)
@click.option("--http-url", help="Triton's HTTP, by default a port below that of gRPC.")
@click.option("--metrics-url", help="Triton's /metrics, by default a port above that of gRPC.")
@click.option(
    "--tool",
    "tools",
    multiple=True,
    type=click.Choice(["perf-analyzer", "aiperf"]),
    help="Measure the same with this as well.",
)
@click.option("--json", "as_json", type=_OUT, metavar="FILE", help="Everything, as JSON; - prints.")
@click.option("--csv", "as_csv", type=_OUT, metavar="FILE", help="Every request; - prints.")
def bench(
    model: str,
    url: str | None,
    concurrency: int | None,
    repository: Path,
    http_url: str | None,
    metrics_url: str | None,
    tools: tuple[str, ...],
    as_json: Path | None,
    as_csv: Path | None,
    **options: Any,
) -> int:
    """Measure a served model: throughput, latency, time to first token and between tokens.

    Keeps --concurrency requests under way, or sends --rate requests a second; latency then counts
    from when a request should have been sent. Ctrl-C prints what came until then.

    \b
    llmserve bench demo --concurrency 8 --requests 98
    llmserve bench demo --rate 5 --duration 30 --limit-latency 500
    llmserve bench demo --dataset mini_cnn_eval.json --concurrency 98 --report report
    """
    from llmserve.client.url import parse_url
    from llmserve.errors import UsageError
    from llmserve.measure.bench import Target, bench
    from llmserve.measure.job import Place
    from llmserve.measure.published import fetch
    from llmserve.measure.standins import marked
    from llmserve.measure.tools import check_tool
    from llmserve_cli.loads import Asked
    from llmserve_cli.output import (
        Meter,
        check_places,
        refuse_two_on_stdout,
        told,
        write_report,
    )

    if concurrency and options["rate"]:
        raise click.UsageError("give --concurrency or --rate, not both")
    refuse_two_on_stdout(as_json, as_csv)
    check_places(as_json, as_csv)
    asked = Asked.of(options, requests=_REQUESTS)
    for tool in tools:
        check_tool(tool)
    if metrics_url and fetch(metrics_url) is None:
        raise UsageError(
            f"there are no metrics at {metrics_url}", mend="leave out --metrics-url, or mend it"
        )
    target = Target(
        model,
        Place(url or str(parse_url())),
        repository=repository,
        tokenizer=asked.tokenizer,
        metrics_url=metrics_url,
        http_url=http_url,
    )
    load = asked.load(concurrency, target.info())
    target = marked(target)
    with Meter(f"measuring {model}, {load.label}", asked.requests, asked.duration) as meter:
        run = bench(target, load, asked.prompts, on_progress=meter.show)
    failures: list[LLMServeError] = []
    if not run.interrupted and run.ended_early is None:
        run, failures = _with_tools(run, target, asked.prompts, tools)
    told(run, as_json, as_csv)
    write_report(run, asked.report)
    if failures:
        # Last, so that what was measured is told in any case.
        raise failures[0]
    return _exit_code(run)


def _with_tools(
    run: Run, target: Target, prompts: Prompts, tools: tuple[str, ...]
) -> tuple[Run, list[LLMServeError]]:
    from dataclasses import replace

    from llmserve.errors import LLMServeError
    from llmserve.measure.tools import run_tool
    from llmserve_cli.status import Status

    failures = []
    for name in tools:
        with Status("") as status:
            status.say(f"measuring {target.model} with {name}")
            try:
                run = replace(run, tools=(*run.tools, run_tool(name, target, run, prompts)))
            except LLMServeError as error:
                failures.append(error)
    return run, failures


def _exit_code(run: Run) -> int:
    """Tell a shell that it was interrupted, that the server is gone, or that nothing came."""
    from llmserve.errors import UnreachableError

    if run.interrupted:
        return 130
    if run.ended_early is not None:
        return UnreachableError.exit_code
    return 0 if any(record.error is None for record in run.records) else 7
