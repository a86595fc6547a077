"""The commands ``bench``, ``compare``, ``sweep`` and ``report``, and their options.

The measuring code is imported only when a command runs, so that ``--help`` responds at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmserve.client import parse_url
from llmserve.commands import assigned
from llmserve.errors import OptionError, UsageError
from llmserve.plugin import Recipe, Registry, parse_assignments
from llmserve.runtime.contract import ADAPTER
from llmserve_bench.results import Load, Result

if TYPE_CHECKING:
    from llmserve_bench.measure import Plan
    from llmserve_bench.output import Progress

_CONCURRENCY = 8
_OUT = click.Path(dir_okay=False, path_type=Path, allow_dash=True)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_NOT_PER_REQUEST = ("self", "model", "prompt", "messages", "stream", "timeout")

_url_option = click.option("--url", envvar="LLMSERVE_URL", help="gRPC, by default 127.0.0.1:8001.")
_repository_option = click.option(
    "--repository", type=click.Path(file_okay=False, path_type=Path), default="model_repository",
    show_default=True, help="Where to find the model's tokenizer.",
)  # fmt: skip
_build_option = click.option(
    "--build", multiple=True, metavar="KEY=VALUE", help="Build option for every variant."
)
_OPTIONS = (
    click.option("--requests", type=click.IntRange(1), help="Number of requests, by default 64."),
    click.option("--duration", type=float, help="Seconds to measure, instead of --requests."),
    click.option("--rate", type=float, help="Requests per second, without waiting for answers."),
    click.option(
        "--arrivals", type=click.Choice(["poisson", "constant"]), default="poisson",
        show_default=True, help="Arrival times of the requests of --rate.",
    ),
    click.option(
        "--dataset", type=_FILE, help="Prompts: a JSON list, JSON lines, or one prompt per line."
    ),
    click.option("--input-tokens", metavar="MEAN[,SD]", help="Length of synthetic prompts."),
    click.option("--output-tokens", metavar="MEAN[,SD]", help="Length of the answers."),
    click.option(
        "--max-input-tokens", type=click.IntRange(1), help="Skip longer prompts in --dataset."
    ),
    click.option(
        "--texts", type=click.IntRange(1), metavar="N",
        help="Texts of a request, by default 1, for a model that computes embeddings, scores or "
        "labels.",
    ),
    click.option(
        "--adapter", "adapters", multiple=True, metavar="NAME",
        help="Ask for this adapter; repeat for several in turn, '' for none.",
    ),
    click.option(
        "--image", "images", multiple=True, metavar="FILE",
        help="Ask about this image; repeat for several in turn, '' for none.",
    ),
    click.option("--warmup", type=click.IntRange(0), help="Requests to send first, not counted."),
    click.option("--stream/--no-stream", default=None, help="Stream the answers, or not."),
    click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same load."),
    click.option("--limit-latency", type=float, metavar="MS", help="Latency limit for goodput."),
    click.option("--limit-ttft", type=float, metavar="MS", help="Limit on time to first token."),
    click.option(
        "--timeout", type=float, default=300.0, show_default=True, help="Seconds per request."
    ),
    click.option(
        "--processes", type=click.IntRange(1, 64), default=1, show_default=True,
        help="Processes that send the requests.",
    ),
    click.option(
        "--tokenizer", type=_FOLDER, help="Tokenizer folder, if the model's own cannot be found."
    ),
    click.option(
        "--set", "assignments", multiple=True, metavar="KEY=VALUE",
        help="An option for every request, such as temperature=0.7.",
    ),
    click.option(
        "--report", type=click.Path(path_type=Path), metavar="DIR", help="Write a report to DIR."
    ),
    click.option("--json", type=_OUT, metavar="FILE", help="Save the result as JSON; - prints it."),
)  # fmt: skip


LoadAt = Callable[[int], Load]
"""Returns the load for a concurrency, which a load with a rate ignores."""


def _measuring(measure: Callable[[dict[str, Any], Plan, LoadAt], Result]) -> Callable[..., Any]:
    """Turn a measuring function into a command that checks the options and prints the result."""

    @wraps(measure)
    def command(**options: Any) -> int:
        from llmserve_bench import output

        # SIGTERM also ends the command cleanly, so that servers and folders are removed.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        output.check_outputs(options["report"], options["json"], options.get("csv"))
        progress = output.Progress()
        with progress:
            result = measure(options, *_set_up(options, progress))
        output.write(result, options["report"], options["json"], options.get("csv"))
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


def _set_up(options: dict[str, Any], progress: Progress) -> tuple[Plan, LoadAt]:
    from llmserve_bench.measure import Plan
    from llmserve_bench.prompts import Lengths, Prompts

    for first, second in (("requests", "duration"), ("concurrency", "rate")):
        if options.get(first) and options[second]:
            raise click.UsageError(f"give --{first} or --{second}, not both")
    for name in ("duration", "rate", "limit_latency", "limit_ttft", "timeout"):
        # This also rejects "nan" and "inf", which click accepts as numbers.
        if options[name] is not None and not 0 < options[name] < inf:
            raise click.UsageError(f"--{name.replace('_', '-')} must be above 0, and finite")
    if options["dataset"] and options["input_tokens"]:
        raise click.UsageError("--dataset has its own prompts: leave out --input-tokens")
    if options["max_input_tokens"] and not options["dataset"]:
        raise click.UsageError("--max-input-tokens works only with --dataset: leave it out")
    for image in filter(None, options["images"]):
        if not Path(image).is_file():
            raise click.UsageError(f"--image {image}: there is no such file")
        if not os.access(image, os.R_OK):
            raise click.UsageError(f"--image {image}: it cannot be read")
    length_options = [name for name in ("input_tokens", "output_tokens") if options[name]]
    lengths = {name: Lengths.parse(options[name]) for name in length_options}
    prompts = Prompts(options["dataset"], max_input_tokens=options["max_input_tokens"], **lengths)
    request_options = _request_options(options["assignments"])
    limits = ("limit_latency", "limit_ttft")
    unchanged = ("rate", "arrivals", "duration", "seed", "processes", "timeout")

    def load_at(concurrency: int) -> Load:
        level = None if options["rate"] else concurrency
        return Load(
            concurrency=level,
            requests=None if options["duration"] else options["requests"] or 64,
            warmup=min(level or 4, 16) if options["warmup"] is None else options["warmup"],
            options=request_options,
            adapters=options["adapters"],
            images=options["images"],
            **{name: options[name] and options[name] / 1000 for name in limits},
            **{name: options[name] for name in unchanged},
        )

    plan = Plan(
        prompts, options["stream"], options["texts"], on_step=progress.step,
        on_progress=progress.count,
    )  # fmt: skip
    return plan, load_at


def _request_options(assignments: tuple[str, ...]) -> dict[str, Any]:
    """Parse ``--set``; numbers, true and false become typed values."""
    request_options = assigned(assignments)
    for key in request_options.keys() & {*_NOT_PER_REQUEST}:
        raise OptionError(f"--set does not accept {key}", hint="see `llmserve bench --help`")
    if ADAPTER.name in request_options:
        raise OptionError("--set does not accept adapter", hint="write --adapter NAME")
    return request_options


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete models, recipes, and the settings that a sweep may vary."""
    names: Iterable[str]
    if param.name == "plugin":
        names = (recipe.name for recipe in Registry.load().all(Recipe))
    elif param.name == "vary":
        from llmserve_bench import measure, targets

        variant = targets.Variant("", ctx.params.get("plugin") or "")
        option_names = variant.option_names(Registry.load()) or ()
        names = (f"{name}=" for name in {*measure.LOADS, *option_names})
    else:
        folder = Path(ctx.params.get("repository") or "model_repository")
        names = (path.parent.name for path in folder.glob("*/config.pbtxt"))
    return sorted(name for name in names if name.startswith(incomplete))


@click.command()
@click.argument("model", shell_complete=_complete)
@_url_option
@click.option("--openai", metavar="URL", help="An OpenAI endpoint to measure, instead of Triton.")
@click.option("--chat", is_flag=True, help="Send chat completions, with --openai.")
@click.option("--embeddings", is_flag=True, help="Ask for embeddings, with --openai.")
@click.option("--concurrency", type=click.IntRange(1), help="Requests in flight, by default 1.")
@_repository_option
@click.option("--http-url", help="Triton's HTTP URL, by default the port below gRPC's.")
@click.option("--metrics-url", help="Triton's /metrics URL, by default the port above gRPC's.")
@click.option(
    "--tool", "tools", multiple=True, type=click.Choice(["perf_analyzer", "aiperf"]),
    help="Also measure the same load with this tool.",
)  # fmt: skip
@click.option("--csv", type=_OUT, metavar="FILE", help="Write every request as CSV; - prints it.")
@_measuring
def bench(options: dict[str, Any], plan: Plan, load_at: LoadAt) -> Result:
    """Measure a served model.

    Reports throughput, latency, time to first token and between tokens, and Triton's own figures.
    Keeps --concurrency requests in flight, or sends --rate requests per second; latency then
    counts from when a request was due. Ctrl-C shows the figures so far.

    \b
    llmserve bench demo --concurrency 8 --requests 98
    llmserve bench demo --rate 5 --duration 30 --limit-latency 500
    llmserve bench demo --openai http://127.0.0.1:8080/v1 --chat --report report
    """
    from llmserve.client import OpenAIApi
    from llmserve_bench import measure, targets, tools, triton

    if options["images"] and (options["tools"] or (options["openai"] and not options["chat"])):
        raise click.UsageError("--image works with --openai only with --chat, and not with --tool")
    settings = {key: options[key] for key in ("repository", "tokenizer", "metrics_url", "http_url")}
    if options["openai"]:
        if options["tools"] or options["metrics_url"] or options["http_url"]:
            raise click.UsageError("--tool, --metrics-url and --http-url do not work with --openai")
        url = OpenAIApi(options["openai"]).url
        settings["api"] = _api(options)
    elif flag := next((name for name in ("chat", "embeddings") if options[name]), None):
        raise click.UsageError(f"--{flag} works only with --openai: leave it out")
    else:
        url = options["url"] or str(parse_url())
    for name in options["tools"]:
        tools.TOOLS[name].check()
    if (metrics := options["metrics_url"]) and triton.fetch(metrics) is None:
        raise UsageError(f"there are no metrics at {metrics}", hint="leave out --metrics-url")
    target = targets.Target(options["model"], url, **settings)
    load = load_at(options["concurrency"] or 1)
    return measure.bench(target, load, plan, options["tools"])


def _api(options: dict[str, Any]) -> str:
    if options["chat"] and options["embeddings"]:
        raise click.UsageError("give --chat or --embeddings, not both")
    named = [name for name in ("chat", "embeddings") if options[name]]
    return named[0] if named else "completions"


@click.command()
@click.argument("subjects", nargs=-1, shell_complete=_complete)
@click.option("--model", help="Model to build variants of: a folder, a hub id, or 'demo'.")
@_url_option
@_build_option
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds.")
@click.option("--concurrency", metavar="N[,N...]", help="Requests in flight, by default 8.")
@click.option(
    "--answers/--no-answers",
    default=None,
    help="Also compare what they answer with the first's answers; the default with --model alone.",
)
@_repository_option
@_measuring
def compare(options: dict[str, Any], plan: Plan, load_at: LoadAt) -> Result:
    """Compare several models in interleaved rounds.

    All get the same load, and differences are shown with their spread. A subject is MODEL or
    MODEL@URL, which is already served, or PLUGIN:KEY=VALUE,..., a variant of --model that is built
    and served for the comparison. A leading LABEL= names it. With --model alone, those are compared
    that suit this machine: what each costs in memory, speed and answers.

    \b
    llmserve compare --model ./my-model --dataset prompts.txt
    llmserve compare demo demo-iterative --concurrency 1,8,32
    llmserve compare static=iterative:batching=static iterative: --model demo
    llmserve compare one=hf:max_batch_size=0 eight=hf:max_batch_size=8 --model gpt2
    """
    from llmserve_bench import measure, targets

    registry, model = Registry.load(), options["model"]
    settings = parse_assignments(options["build"])
    subjects = [targets.parse_subject(text) for text in options["subjects"]]
    answers = options["answers"]
    if not subjects and model:
        subjects, answers = [*targets.suited(model, registry)], answers is not False
    if len(subjects) < 2:
        raise click.UsageError("give two subjects or more, or --model alone")
    levels = _numbers(options["concurrency"] or str(_CONCURRENCY))
    loads = [load_at(level) for level in levels]
    variants = [subject for subject in subjects if isinstance(subject, targets.Variant)]
    if variants and model is None:
        raise click.UsageError(f"{variants[0].label} must be built: name its --model")
    variants = targets.with_settings(variants, settings, registry, plan.on_step)
    url, repository = options["url"] or str(parse_url()), options["repository"]
    with targets.serving(variants, model, registry, plan.on_step) as served:
        built = iter(served)
        compared = [
            next(built)
            if isinstance(subject, targets.Variant)
            else replace(subject, url=subject.url or url, repository=repository)
            for subject in subjects
        ]
        compared = [replace(target, tokenizer=options["tokenizer"]) for target in compared]
        return measure.compare(
            compared, loads, plan, rounds=options["rounds"], answers=bool(answers)
        )


@click.command()
@click.argument("model")
@click.option("--plugin", required=True, shell_complete=_complete, help="See `llmserve plugins`.")
@click.option(
    "--vary", multiple=True, required=True, metavar="KEY=VALUE,VALUE",
    shell_complete=_complete,
    help="A build option, batching, concurrency or rate; repeat for several.",
)  # fmt: skip
@_build_option
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds.")
@click.option("--concurrency", type=click.IntRange(1), help="Requests in flight, unless varied.")
@_measuring
def sweep(options: dict[str, Any], plan: Plan, load_at: LoadAt) -> Result:
    """Find the fastest way to serve a model.

    Builds, serves and measures every variant in rounds, and ranks all by throughput, those within
    --limit-latency and --limit-ttft first. Ctrl-C shows the ranking so far.

    \b
    llmserve sweep demo --plugin hf --vary max_batch_size=4,8,16 --vary queue_delay_us=0,2000
    llmserve sweep demo --plugin iterative --vary batching=static,iterative --vary concurrency=1,8
    """
    from llmserve_bench import measure

    varied, common = measure.parse_varied(options["vary"]), parse_assignments(options["build"])
    if repeated := sorted(varied.keys() & common.keys()):
        raise UsageError(f"{repeated[0]} is in both --vary and --build", hint="leave out one")
    if (options["concurrency"] or options["rate"]) and varied.keys() & set(measure.LOADS):
        raise click.UsageError("--vary already sets the load: leave out --concurrency and --rate")
    load, model = load_at(options["concurrency"] or _CONCURRENCY), options["model"]
    cases, variants = measure.make_cases(options["plugin"], model, varied, common, load)
    registry, rounds = Registry.load(), options["rounds"]
    return measure.sweep(cases, variants, model, plan, registry, rounds=rounds)


@click.command()
@click.argument("result", type=click.Path(path_type=Path), metavar="RESULT.json")
@click.option(
    "--output", type=click.Path(path_type=Path), default="report", show_default=True,
    metavar="DIR", help="Folder to write to; created if it does not exist.",
)  # fmt: skip
def report(result: Path, output: Path) -> None:
    """Recreate the report of a saved measurement.

    Reads a file that --json wrote, writes a self-contained page and prints its path.

    \b
    llmserve bench demo --concurrency 8 --json run.json
    llmserve report run.json --output report
    """
    from llmserve_bench.output import check_outputs, load, write_report

    check_outputs(output)
    click.echo(str(write_report(load(result), output)))


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.UsageError(f"{text!r} is not a list of numbers above 0: write 1,8,32")
    return list(dict.fromkeys(int(part) for part in parts))
