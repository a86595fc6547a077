"""The commands ``bench``, ``compare``, ``sweep`` and ``report``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

from llmserve.client.url import parse_url
from llmserve.errors import UsageError
from llmserve.options import parse_assignments
from llmserve.registry import Registry
from llmserve.roles import Recipe
from llmserve_bench.options import (
    Setup,
    build_option,
    check_outputs,
    csv_option,
    measuring,
    repository_option,
    url_option,
)
from llmserve_bench.results import Result

_CONCURRENCY = 8


def _complete_model(ctx: click.Context, _: click.Parameter, begun: str) -> list[str]:
    folder = Path(ctx.params.get("repository") or "model_repository")
    return sorted(path.parent.name for path in folder.glob(f"{begun}*/config.pbtxt"))


def _complete_recipe(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    names = (recipe.name for recipe in Registry.load().all(Recipe))
    return sorted(name for name in names if name.startswith(begun))


def _complete_pair(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    from llmserve_bench.targets import find_pairs

    return [name for name in ("list", *find_pairs(Registry.load())) if name.startswith(begun)]


def _complete_vary(ctx: click.Context, _: click.Parameter, begun: str) -> list[str]:
    from llmserve_bench.measure import LOADS
    from llmserve_bench.targets import Variant

    known = Variant("", ctx.params.get("plugin") or "").known(Registry.load()) or set()
    return [f"{name}=" for name in sorted({*LOADS, *known}) if name.startswith(begun)]


@click.command()
@click.argument("model", shell_complete=_complete_model)
@url_option
@click.option("--openai", metavar="URL", help="An OpenAI endpoint to measure, instead of Triton.")
@click.option("--chat", is_flag=True, help="Send chat completions, with --openai.")
@click.option("--concurrency", type=click.IntRange(1), help="Requests under way, by default 1.")
@repository_option
@click.option("--http-url", help="Triton's HTTP, by default a port below that of gRPC.")
@click.option("--metrics-url", help="Triton's /metrics, by default a port above that of gRPC.")
@click.option(
    "--tool", "tools", multiple=True, type=click.Choice(["perf_analyzer", "aiperf"]),
    help="Measure the same with this as well.",
)  # fmt: skip
@csv_option
@measuring
def bench(setup: Setup) -> Result:
    """Measure a served model.

    Throughput, latency, time to first token and between tokens, and what Triton says of it. Keeps
    --concurrency requests under way, or sends --rate requests a second; latency then counts from
    when a request was due. Ctrl-C shows the figures until then.

    \b
    llmserve bench demo --concurrency 8 --requests 98
    llmserve bench demo --rate 5 --duration 30 --limit-latency 500
    llmserve bench demo --openai http://127.0.0.1:8080/v1 --chat --report report
    """
    from llmserve_bench.measure import bench
    from llmserve_bench.senders import base_url, import_aiohttp
    from llmserve_bench.targets import Target
    from llmserve_bench.tools import TOOLS
    from llmserve_bench.triton import fetch

    options = setup.options
    model, tokenizer = options["model"], options["tokenizer"]
    load = setup.load_at(options["concurrency"] or 1)
    if options["openai"]:
        if options["tools"] or options["metrics_url"] or options["http_url"]:
            raise click.UsageError("--tool, --metrics-url and --http-url are for Triton")
        import_aiohttp()
        target = Target(
            model, base_url(options["openai"]), repository=options["repository"],
            tokenizer=tokenizer, api="chat" if options["chat"] else "completions",
        )  # fmt: skip
        return bench(target, load, setup.plan)
    if options["chat"]:
        raise click.UsageError("--chat is for --openai: leave it out")
    for name in options["tools"]:
        TOOLS[name].check()
    if (metrics := options["metrics_url"]) and fetch(metrics) is None:
        raise UsageError(f"there are no metrics at {metrics}", mend="leave out --metrics-url")
    places = {key: options[key] for key in ("repository", "tokenizer", "metrics_url", "http_url")}
    target = Target(model, options["url"] or str(parse_url()), **places)
    return bench(target, load, setup.plan, options["tools"])


@click.command()
@click.argument("subjects", nargs=-1, shell_complete=_complete_model)
@click.option(
    "--pair", shell_complete=_complete_pair, help="A ready-made pair; --pair list names them."
)
@click.option("--model", help="What to build variants of: a folder, an id on the hub, or 'demo'.")
@url_option
@build_option
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Turns.")
@click.option("--concurrency", metavar="N[,N...]", help="Requests under way, by default 8.")
@repository_option
@measuring
def compare(setup: Setup) -> Result:
    """Measure several models in turns.

    All get the same load, and the difference comes with its spread. A subject is MODEL or
    MODEL@URL, which is served already, or PLUGIN:KEY=VALUE,..., a variant of --model that is built
    and served for the purpose. LABEL= in front names it.

    \b
    llmserve compare demo demo-iterative --concurrency 1,8,32
    llmserve compare --pair static-inflight --model demo --concurrency 98 --requests 98
    llmserve compare one=hf:max_batch_size=0 eight=hf:max_batch_size=8 --model gpt2
    """
    from llmserve_bench.measure import compare
    from llmserve_bench.targets import (
        Target,
        Variant,
        building,
        find_pairs,
        parse_subject,
        serving,
        with_settings,
    )

    options, plan, registry = setup.options, setup.plan, Registry.load()
    pairs, pair, model = find_pairs(registry), options["pair"], options["model"]
    if pair == "list":
        for one in pairs.values():
            given = "".join(f" --build {key}={value}" for key, value in one.common.items())
            click.echo(f"{one.name}: {one.first} {one.second}{given}")
        raise SystemExit(0)
    if pair is not None and options["subjects"]:
        raise click.UsageError("give a pair or subjects, not both")
    if pair is not None and pair not in pairs:
        names = ", ".join(pairs) or "no recipe that is installed offers one"
        raise click.UsageError(f"there is no pair {pair!r}: {names}")
    chosen = pairs[pair] if pair else None
    texts = (chosen.first, chosen.second) if chosen else options["subjects"]
    subjects = [parse_subject(text) for text in texts]
    if len(subjects) < 2:
        raise click.UsageError("give two subjects or more, or --pair")
    levels = _numbers(options["concurrency"] or str(_CONCURRENCY))
    variants = [one for one in subjects if isinstance(one, Variant)]
    if variants and model is None:
        raise click.UsageError(f"{variants[0].label} is to be built: name its --model")
    common = parse_assignments(options["build"])
    for settings in (common, chosen.defaults(common) if chosen else {}):
        variants = with_settings(variants, settings, registry, plan.on_step)
    with ExitStack() as stack:
        served: list[Target] = []
        if variants:
            folder = stack.enter_context(building(variants, model, registry, plan.on_step))
            served = stack.enter_context(serving(variants, model, folder, plan.on_step))
        built = iter(served)
        url, repository = options["url"] or str(parse_url()), options["repository"]
        targets = [
            next(built)
            if isinstance(one, Variant)
            else replace(one, url=one.url or url, repository=repository)
            for one in subjects
        ]
        targets = [replace(target, tokenizer=options["tokenizer"]) for target in targets]
        loads = [setup.load_at(level) for level in levels]
        return compare(targets, loads, plan, rounds=options["rounds"], title=pair or "")


@click.command()
@click.argument("model")
@click.option(
    "--plugin", required=True, shell_complete=_complete_recipe, help="See `llmserve plugins`."
)
@click.option(
    "--vary", multiple=True, required=True, metavar="KEY=VALUE,VALUE",
    shell_complete=_complete_vary,
    help="A build option, batching, concurrency or rate; repeat for several.",
)  # fmt: skip
@build_option
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Turns.")
@click.option(
    "--concurrency", type=click.IntRange(1), help="Requests under way, where it is not varied."
)
@measuring
def sweep(setup: Setup) -> Result:
    """Find the fastest way to serve a model.

    Builds, serves and measures every variant in rounds, and ranks them by throughput among those
    within --limit-latency and --limit-ttft. Ctrl-C shows the ranking until then.

    \b
    llmserve sweep demo --plugin hf --vary max_batch_size=4,8,16 --vary queue_delay_us=0,2000
    llmserve sweep demo --plugin iterative --vary batching=static,iterative --vary concurrency=1,8
    """
    from llmserve_bench.measure import LOADS, make_cases, parse_varied, sweep

    options, varied = setup.options, parse_varied(setup.options["vary"])
    common = parse_assignments(options["build"])
    if twice := sorted(varied.keys() & common.keys()):
        raise UsageError(f"{twice[0]} is varied and given", mend="leave it out of --build")
    if (options["concurrency"] or setup.load.rate) and varied.keys() & set(LOADS):
        raise click.UsageError("--concurrency and --rate are for sweeps that vary neither of them")
    load, model = setup.load_at(options["concurrency"] or _CONCURRENCY), options["model"]
    cases, variants = make_cases(options["plugin"], model, varied, common, load)
    registry, rounds = Registry.load(), options["rounds"]
    return sweep(cases, variants, model, setup.plan, registry, rounds=rounds)


@click.command()
@click.argument("result", type=click.Path(path_type=Path), metavar="RESULT.json")
@click.option(
    "--output", type=click.Path(path_type=Path), default="report", show_default=True,
    metavar="DIR", help="The folder to write to; it is made if need be.",
)  # fmt: skip
def report(result: Path, output: Path) -> None:
    """Make the report of a measurement again.

    Reads what --json has saved and prints the page that it wrote, which needs no other file.

    \b
    llmserve bench demo --concurrency 8 --json run.json
    llmserve report run.json --output report
    """
    from llmserve_bench.files import load
    from llmserve_bench.report import write_report

    check_outputs(output)
    click.echo(str(write_report(load(result), output)))


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise click.UsageError(f"{text!r} is not a list of numbers above 0: write 1,8,32")
    return list(dict.fromkeys(found))
