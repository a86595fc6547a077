"""Options that say how a model is asked: the same for bench, compare and sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from llmserve.client.model import ModelInfo
    from llmserve.measure.plan import Prompts
    from llmserve.measure.runs import Load

F = TypeVar("F", bound=Callable[..., Any])
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_OPTIONS = (
    click.option("--requests", type=click.IntRange(1), help="How many requests to measure."),
    click.option("--duration", type=float, help="Seconds to measure, instead of --requests."),
    click.option("--rate", type=float, help="Send so many a second, whatever comes back."),
    click.option(
        "--arrivals",
        type=click.Choice(["poisson", "constant"]),
        default="poisson",
        show_default=True,
        help="How requests of a --rate arrive.",
    ),
    click.option(
        "--dataset", type=_FILE, help="Prompts: a JSON list, JSON lines, or a prompt a line."
    ),
    click.option("--input-tokens", metavar="MEAN[,SD]", help="Length of made-up prompts."),
    click.option("--output-tokens", metavar="MEAN[,SD]", help="Length of answers."),
    click.option(
        "--max-input-tokens", type=click.IntRange(1), help="Skip longer prompts of a --dataset."
    ),
    click.option("--warmup", type=click.IntRange(0), help="Requests before, which do not count."),
    click.option("--stream/--no-stream", default=None, help="Pieces or whole answers."),
    click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same load."),
    click.option("--limit-latency", type=float, metavar="MS", help="Limit for goodput."),
    click.option(
        "--limit-ttft", type=float, metavar="MS", help="Limit on the time to first token."
    ),
    click.option(
        "--timeout", type=float, default=300.0, show_default=True, help="Seconds per request."
    ),
    click.option(
        "--processes",
        type=click.IntRange(1, 64),
        default=1,
        show_default=True,
        help="Load generators to share the work.",
    ),
    click.option(
        "--tokenizer", type=_FOLDER, help="Tokenizer folder, where the model's is out of reach."
    ),
    click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        help="An option for every request, such as temperature=0.7.",
    ),
    click.option(
        "--report", type=click.Path(path_type=Path), metavar="DIR", help="Write a report there."
    ),
)


def load_options(command: F) -> F:
    """Add them all to a command, which gets them as keywords for :meth:`Asked.of`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class Asked:
    """What the options of :func:`load_options` said, checked."""

    prompts: Prompts
    requests: int | None
    duration: float | None
    rate: float | None
    warmup: int | None
    stream: bool | None
    arrivals: str
    given: dict[str, Any]
    tokenizer: Path | None
    report: Path | None

    @classmethod
    def of(cls, options: dict[str, Any], *, requests: int) -> Asked:
        """Check the options; without ``--requests`` and ``--duration`` so many are sent."""
        from llmserve.measure.plan import Lengths, Prompts
        from llmserve_cli.query import _assigned

        if options["requests"] and options["duration"]:
            raise click.UsageError("give --requests or --duration, not both")
        for name in ("duration", "rate", "limit_latency", "limit_ttft", "timeout"):
            # Neither "nan" nor "inf", which click takes for numbers.
            if options[name] is not None and not 0 < options[name] < inf:
                raise click.UsageError(f"--{name.replace('_', '-')} must be above 0, and finite")
        lengths = {
            name: options[name] and Lengths.parse(options[name])
            for name in ("input_tokens", "output_tokens")
        }
        if options["dataset"] and lengths["input_tokens"]:
            raise click.UsageError("--dataset has its own prompts: leave out --input-tokens")
        if options["max_input_tokens"] and not options["dataset"]:
            raise click.UsageError("--max-input-tokens is for a --dataset: leave it out")
        if options["report"]:
            from llmserve.report import require

            require()  # Now, not when everything has been measured.
        prompts = Prompts(
            options["dataset"], **lengths, max_input_tokens=options["max_input_tokens"]
        )
        count = None if options["duration"] else options["requests"] or requests
        given = {
            "seed": options["seed"],
            "arrivals": options["arrivals"] if options["rate"] else None,
            "options": _assigned(options["assignments"], set()),
            "limit_latency": _seconds(options["limit_latency"]),
            "limit_ttft": _seconds(options["limit_ttft"]),
            "processes": options["processes"],
            "timeout": options["timeout"],
        }
        return cls(
            prompts,
            count,
            options["duration"],
            options["rate"],
            options["warmup"],
            options["stream"],
            options["arrivals"],
            given,
            options["tokenizer"],
            options["report"],
        )

    def at(self, rate: float | None) -> Asked:
        """Give the same with a rate, where there is one."""
        if rate is None:
            return self
        return replace(self, rate=rate, given={**self.given, "arrivals": self.arrivals})

    def load(self, concurrency: int | None, *infos: ModelInfo) -> Load:
        """Make a load for models; they stream where all of them can."""
        from llmserve.measure.runs import Load

        can = all(info.exchange != "unary" for info in infos)
        if self.stream and not can:
            names = ", ".join(info.name for info in infos if info.exchange == "unary")
            raise click.UsageError(f"{names} answers in one piece: leave out --stream")
        stream = can if self.stream is None else self.stream
        given: dict[str, Any] = {
            **self.given, "requests": self.requests, "duration": self.duration, "stream": stream
        }  # fmt: skip
        if self.warmup is not None:
            given["warmup"] = self.warmup
        if self.rate is not None:
            return Load.open(self.rate, **given)
        return Load.closed(concurrency or 1, **given)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
