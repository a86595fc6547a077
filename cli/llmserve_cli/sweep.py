"""``llmserve sweep``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmserve_cli.complete import recipe_names
from llmserve_cli.loads import load_options

if TYPE_CHECKING:
    from llmserve.client.model import ModelInfo
    from llmserve.measure.runs import Load

_OUT = click.Path(dir_okay=False, path_type=Path, allow_dash=True)
_REQUESTS = 64


@click.command()
@click.argument("model")
@click.option(
    "--plugin", required=True, shell_complete=recipe_names, help="See `llmserve plugins`."
)
@click.option(
    "--vary", multiple=True, required=True, metavar="KEY=VALUE,VALUE",
    help="A build option, batching, or concurrency; repeat for several.",
)  # fmt: skip
@click.option(
    "--build", "common", multiple=True, metavar="KEY=VALUE", help="Build all variants with this."
)
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True,
    help="Turns for those that still can win.",
)  # fmt: skip
@click.option(
    "--concurrency", type=click.IntRange(1), help="Requests under way, where it is not varied."
)
@click.option(
    "--state", type=click.Path(dir_okay=False, path_type=Path), default=Path("llmserve-sweep.json"),
    show_default=True, help="What is known so far; a sweep goes on from there.",
)  # fmt: skip
@load_options
@click.option("--json", "as_json", type=_OUT, metavar="FILE", help="Everything, as JSON; - prints.")
def sweep(
    model: str,
    plugin: str,
    vary: tuple[str, ...],
    common: tuple[str, ...],
    rounds: int,
    concurrency: int | None,
    state: Path,
    as_json: Path | None,
    **options: Any,
) -> int:
    """Find the fastest way to serve a model: build, serve and measure every variant.

    Variants that cannot win any more are stopped, the others are ranked by throughput among those
    within --limit-latency and --limit-ttft. After an interruption the same command goes on.

    \b
    llmserve sweep demo --plugin hf --vary max_batch_size=4,8,16 --vary queue_delay_us=0,2000
    llmserve sweep demo --plugin iterative --vary batching=static,iterative --vary concurrency=1,8
    """
    from llmserve.errors import UsageError
    from llmserve.measure.codec import encode
    from llmserve.measure.grid import parse_varied
    from llmserve.measure.sweep import Sweeping
    from llmserve.measure.sweep import sweep as swept
    from llmserve.options import parse_assignments
    from llmserve_cli.ending import end_in_order
    from llmserve_cli.loads import Asked
    from llmserve_cli.output import check_places, save_json, write_report
    from llmserve_cli.shown import print_sweep
    from llmserve_cli.status import Status

    check_places(state, as_json)
    varied = parse_varied(vary)
    asked = Asked.of(options, requests=_REQUESTS)
    shared = dict(parse_assignments(common))
    if twice := sorted(varied.keys() & shared.keys()):
        raise UsageError(f"{twice[0]} is varied and given", mend="leave it out of --build")
    if concurrency and ("concurrency" in varied or "rate" in varied or asked.rate):
        raise click.UsageError("--concurrency is for sweeps that vary neither it nor a rate")
    if asked.rate and ("concurrency" in varied or "rate" in varied):
        raise click.UsageError("--rate is for sweeps that vary neither it nor concurrency")

    def load(level: int | None, rate: float | None, info: ModelInfo) -> Load:
        return asked.at(rate).load(level or concurrency or 8, info)

    end_in_order(signal.SIGTERM)
    prompts = {name: part for name, part in vars(asked.prompts).items() if part is not None}
    settings = {
        "build": shared,
        "load": {**encode(asked.given), "requests": asked.requests, "duration": asked.duration},
        "asked": [asked.rate, concurrency, asked.warmup, asked.stream],
        "prompts": {name: str(part) for name, part in prompts.items()},
    }
    with Status(f"sweeping {model}") as status:
        sweeping = Sweeping(
            plugin, model, varied, shared, asked.prompts, load, rounds,
            asked.given["limit_latency"], asked.given["limit_ttft"], settings, status.say,
        )  # fmt: skip
        found = swept(sweeping, state)
    save_json(found, as_json)
    if as_json != Path("-"):
        print_sweep(found)
    write_report(found, asked.report)
    if found.interrupted:
        click.echo(f"llmserve: interrupted; the same command goes on from {state}", err=True)
        return 130
    return 0 if found.ranking else 1
