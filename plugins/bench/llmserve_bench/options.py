"""Options that bench, compare and sweep have in common, and what they make of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmserve.errors import OptionError, UsageError
from llmserve.options import parse_assignments
from llmserve_bench.results import Load, Result

if TYPE_CHECKING:
    from llmserve_bench.measure import Plan
    from llmserve_bench.terminal import Progress

STDOUT = Path("-")
_OUT = click.Path(dir_okay=False, path_type=Path, allow_dash=True)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_NOT_PER_REQUEST = ("self", "model", "prompt", "messages", "stream", "timeout")

url_option = click.option("--url", envvar="LLMSERVE_URL", help="gRPC, by default 127.0.0.1:8001.")
repository_option = click.option(
    "--repository", type=click.Path(file_okay=False, path_type=Path), default="model_repository",
    show_default=True, help="Where the model's tokenizer may be read.",
)  # fmt: skip
build_option = click.option(
    "--build", multiple=True, metavar="KEY=VALUE", help="Build all variants with this."
)
csv_option = click.option(
    "--csv", type=_OUT, metavar="FILE", help="Write every request as CSV; - prints it."
)
_OPTIONS = (
    click.option("--requests", type=click.IntRange(1), help="How many requests, by default 64."),
    click.option("--duration", type=float, help="Seconds to measure, instead of --requests."),
    click.option("--rate", type=float, help="Send so many a second, whatever comes back."),
    click.option(
        "--arrivals", type=click.Choice(["poisson", "constant"]), default="poisson",
        show_default=True, help="How requests of a --rate arrive.",
    ),
    click.option(
        "--dataset", type=_FILE, help="Prompts: a JSON list, JSON lines, or a prompt a line."
    ),
    click.option("--input-tokens", metavar="MEAN[,SD]", help="Length of synthetic prompts."),
    click.option("--output-tokens", metavar="MEAN[,SD]", help="Length of answers."),
    click.option(
        "--max-input-tokens", type=click.IntRange(1), help="Skip longer prompts of a --dataset."
    ),
    click.option("--warmup", type=click.IntRange(0), help="Requests before, which do not count."),
    click.option("--stream/--no-stream", default=None, help="Answers in pieces, or whole."),
    click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same load."),
    click.option("--limit-latency", type=float, metavar="MS", help="Latency limit for goodput."),
    click.option("--limit-ttft", type=float, metavar="MS", help="Limit on the first token."),
    click.option(
        "--timeout", type=float, default=300.0, show_default=True, help="Seconds per request."
    ),
    click.option(
        "--processes", type=click.IntRange(1, 64), default=1, show_default=True,
        help="Processes that share the sending.",
    ),
    click.option(
        "--tokenizer", type=_FOLDER, help="Tokenizer folder, where the model's is out of reach."
    ),
    click.option(
        "--set", "assignments", multiple=True, metavar="KEY=VALUE",
        help="An option for every request, such as temperature=0.7.",
    ),
    click.option(
        "--report", type=click.Path(path_type=Path), metavar="DIR", help="Write a report there."
    ),
    click.option("--json", type=_OUT, metavar="FILE", help="Write all of it as JSON; - prints it."),
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    options: dict[str, Any]
    load: Load
    plan: Plan

    def load_at(self, concurrency: int) -> Load:
        """Give the load with so many requests under way, unless it has a rate."""
        if self.load.rate:
            return self.load
        warmup = self.options["warmup"]
        warmup = min(concurrency, 16) if warmup is None else warmup
        return replace(self.load, concurrency=concurrency, warmup=warmup)


def measuring(measure: Callable[[Setup], Result]) -> Callable[..., Any]:
    """Make a command of a function that measures: it checks the options and prints the result."""

    @wraps(measure)
    def command(**options: Any) -> int:
        from llmserve_bench.terminal import Progress

        # Also SIGTERM ends it in order, so that servers and folders are cleaned up.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        check_outputs(options["report"], options["json"], options.get("csv"))
        with Progress() as progress:
            result = measure(_set_up(options, progress))
        _write(result, options["report"], options["json"], options.get("csv"))
        if result.interrupted:
            return 130
        if result.ended_early:
            return 4
        if not any(run.good for run in result.runs):
            return 7
        return 1 if result.problems else 0

    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _set_up(options: dict[str, Any], progress: Progress) -> Setup:
    from llmserve_bench.measure import Plan
    from llmserve_bench.prompts import Lengths, Prompts

    for one, other in (("requests", "duration"), ("concurrency", "rate")):
        if options.get(one) and options[other]:
            raise click.UsageError(f"give --{one} or --{other}, not both")
    for name in ("duration", "rate", "limit_latency", "limit_ttft", "timeout"):
        # Neither "nan" nor "inf", which click takes for numbers.
        if options[name] is not None and not 0 < options[name] < inf:
            raise click.UsageError(f"--{name.replace('_', '-')} must be above 0, and finite")
    if options["dataset"] and options["input_tokens"]:
        raise click.UsageError("--dataset has its own prompts: leave out --input-tokens")
    if options["max_input_tokens"] and not options["dataset"]:
        raise click.UsageError("--max-input-tokens is for a --dataset: leave it out")
    given = [name for name in ("input_tokens", "output_tokens") if options[name]]
    lengths = {name: Lengths.parse(options[name]) for name in given}
    prompts = Prompts(options["dataset"], max_input_tokens=options["max_input_tokens"], **lengths)
    limits = ("limit_latency", "limit_ttft")
    load = Load(
        requests=None if options["duration"] else options["requests"] or 64,
        options=_request_options(options["assignments"]),
        warmup=4 if options["warmup"] is None else options["warmup"],
        **{name: options[name] and options[name] / 1000 for name in limits},
        **{
            name: options[name]
            for name in ("rate", "arrivals", "duration", "seed", "processes", "timeout")
        },
    )
    plan = Plan(prompts, options["stream"], on_step=progress.step, on_progress=progress.count)
    return Setup(options, load, plan)


def _request_options(assignments: tuple[str, ...]) -> dict[str, Any]:
    """Read ``--set``: numbers, true and false are taken for what they are."""
    found: dict[str, Any] = {}
    for key, text in parse_assignments(assignments).items():
        if key in _NOT_PER_REQUEST:
            raise OptionError(f"--set cannot give {key}", mend="see `llmserve bench --help`")
        try:
            value = json.loads(text, parse_constant=str)
        except (ValueError, RecursionError):
            value = text
        found[key] = value if isinstance(value, bool | int | float) else text
    return found


def check_outputs(report: Path | None, *outputs: Path | None) -> None:
    if outputs.count(STDOUT) > 1:
        raise click.UsageError("only one of --json and --csv can go to standard output")
    if report is not None and report.exists() and not report.is_dir():
        raise UsageError(f"{report} is a file", mend="--report takes a folder, which it makes")
    folder = report.absolute() if report else None
    while folder is not None and not folder.exists():
        folder = folder.parent
    files = (path.absolute().parent for path in outputs if path not in (None, STDOUT))
    for path in (folder, *files):
        if path is not None and not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
            why = "cannot be written to" if path.is_dir() else "is not a folder"
            raise UsageError(f"{path} {why}")


def _write(result: Result, report: Path | None, json: Path | None, csv: Path | None) -> None:
    from llmserve_bench.files import save, to_csv, to_json
    from llmserve_bench.tables import notes_of
    from llmserve_bench.terminal import print_tables

    page = None
    try:
        # Files first: who reads standard output may be gone before its end.
        if json is not None and json != STDOUT:
            save(result, json)
        if csv is not None and csv != STDOUT:
            csv.write_text(to_csv(result), encoding="utf-8")
        if report is not None:
            from llmserve_bench.report import write_report

            page = write_report(result, report)
    finally:
        if json == STDOUT:
            click.echo(to_json(result))
        elif csv == STDOUT:
            click.echo(to_csv(result), nl=False)
        else:
            print_tables(result)
        for note in notes_of(result):
            click.echo(f"llmserve: {note}", err=True)
    if page is not None:
        click.echo(f"llmserve: wrote {page}", err=True)
