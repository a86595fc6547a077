"""``llmserve compare``."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmserve_cli.loads import load_options

if TYPE_CHECKING:
    from llmserve.measure.bench import Target
    from llmserve.measure.subjects import Built, Served

_OUT = click.Path(dir_okay=False, path_type=Path, allow_dash=True)
_REQUESTS = 64


@click.command()
@click.argument("subjects", nargs=-1)
@click.option("--pair", help="A ready-made pair; --pair list names them.")
@click.option("--model", help="What to build variants of: a folder, an id on the hub, or 'demo'.")
@click.option("--url", envvar="LLMSERVE_URL", help="gRPC address of models that are served.")
@click.option(
    "--build", "common", multiple=True, metavar="KEY=VALUE", help="Build all variants with this."
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Turns.")
@click.option("--concurrency", metavar="N[,N...]", help="Requests under way, by default 8.")
@load_options
@click.option(
    "--repository",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("model_repository"),
    show_default=True,
    help="Where the tokenizer of the first model may be read.",
)
@click.option("--json", "as_json", type=_OUT, metavar="FILE", help="Everything, as JSON; - prints.")
def compare(
    subjects: tuple[str, ...],
    pair: str | None,
    model: str | None,
    url: str | None,
    common: tuple[str, ...],
    rounds: int,
    concurrency: str | None,
    repository: Path,
    as_json: Path | None,
    **options: Any,
) -> int:
    """Measure several models in turns, under the same load, and say how sure the difference is.

    A subject is MODEL or MODEL@URL, which is served already, or PLUGIN:KEY=VALUE,..., a variant
    of --model that is built and served for the purpose. LABEL= in front names it.

    \b
    llmserve compare demo demo-iterative --concurrency 1,8,32
    llmserve compare --pair static-inflight --model demo --concurrency 98 --requests 98
    llmserve compare one=hf:max_batch_size=0 eight=hf:max_batch_size=8 --model gpt2
    """
    from llmserve.measure.compare import compare as measured
    from llmserve.measure.pairs import PAIRS
    from llmserve.measure.standins import marked
    from llmserve.measure.subjects import parse_subject
    from llmserve.options import parse_assignments
    from llmserve_cli.ending import end_in_order
    from llmserve_cli.loads import Asked
    from llmserve_cli.output import check_places, save_json, write_report
    from llmserve_cli.shown import Steps, print_comparison

    if pair == "list":
        for name, one in PAIRS.items():
            given = "".join(f" --build {key}={value}" for key, value in one.common.items())
            click.echo(f"{name}: {one.first} {one.second}{given}")
        return 0
    if pair is not None and (subjects or pair not in PAIRS):
        raise click.UsageError(
            "give a pair or subjects, not both" if subjects
            else f"there is no pair {pair!r}: choose one of {', '.join(PAIRS)}"
        )  # fmt: skip
    check_places(as_json)
    asked = Asked.of(options, requests=_REQUESTS)
    chosen = PAIRS[pair] if pair else None
    wanted = [
        parse_subject(text) for text in ((chosen.first, chosen.second) if chosen else subjects)
    ]
    shared = parse_assignments(common)
    usual = chosen.defaults(shared) if chosen else {}
    if len(wanted) < 2:
        raise click.UsageError("give two subjects or more, or --pair")
    if concurrency and asked.rate:
        raise click.UsageError("give --concurrency or --rate, not both")
    levels = numbers(concurrency or "8") if asked.rate is None else [1]
    end_in_order(signal.SIGTERM)
    with _targets(wanted, model, shared, usual, url, repository, asked.tokenizer) as targets:
        infos = [target.info() for target in targets]
        targets = [marked(target) for target in targets]
        loads = [asked.load(level, *infos) for level in levels]
        with Steps(asked) as steps:
            title = pair or ""
            found = measured(
                targets, infos, loads, asked.prompts, rounds=rounds, title=title,
                on_step=steps.begin,
            )  # fmt: skip
    save_json(found, as_json)
    if as_json != Path("-"):
        print_comparison(found)
    write_report(found, asked.report)
    if found.ended_early:
        click.echo(f"llmserve: ended early: {found.ended_early}", err=True)
        return 1
    return 130 if found.interrupted else 0


def numbers(text: str) -> list[int]:
    """Read ``1,8,32``."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise click.UsageError(f"{text!r} is no list of numbers above 0: write 1,8,32")
    return list(dict.fromkeys(found))


@contextmanager
def _targets(
    wanted: Sequence[Built | Served],
    model: str | None,
    shared: Mapping[str, str],
    usual: Mapping[str, str],
    url: str | None,
    repository: Path,
    tokenizer: Path | None,
) -> Iterator[list[Target]]:
    """Build and serve what is to be built, and give all subjects in their order."""
    from contextlib import ExitStack
    from dataclasses import replace

    from llmserve.client.url import parse_url
    from llmserve.measure.bench import Target
    from llmserve.measure.job import Place
    from llmserve.measure.subjects import Built, serving, with_defaults
    from llmserve_cli.status import Status

    variants = [one for one in wanted if isinstance(one, Built)]
    if variants and model is None:
        raise click.UsageError(f"{variants[0].label} is to be built: name its --model")
    with ExitStack() as stack:
        made: list[Target] = []
        if variants:
            with Status("building") as status:
                variants = with_defaults(variants, shared, report=status.say)
                variants = with_defaults(variants, usual)
                made = stack.enter_context(serving(variants, str(model), report=status.say))
        waiting = iter(made)
        targets = [
            next(waiting)
            if isinstance(one, Built)
            else Target(one.model, Place(one.url or url or str(parse_url())), one.label, repository)
            for one in wanted
        ]
        yield [replace(target, tokenizer=tokenizer) for target in targets]
