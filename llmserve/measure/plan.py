"""The requests of a measurement, settled before it starts: the same seed gives the same."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import UsageError
from llmserve.measure.arrivals import arrival_times
from llmserve.measure.dataset import Sample, read_dataset
from llmserve.measure.job import Ask
from llmserve.measure.runs import Load
from llmserve.measure.synthetic import draw_length, make_prompt
from llmserve.measure.tokens import Counter

_LONGEST = 1_000_000
_MOST = 10_000_000
DISTINCT = 256
"""Most made-up prompts under a duration, where requests repeat themselves after that many."""


@dataclass(frozen=True)
class Lengths:
    """A mean and a standard deviation of tokens, as ``--input-tokens 128,16`` gives them."""

    mean: float
    deviation: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read ``128`` or ``128,16``."""
        mean, _, deviation = text.partition(",")
        try:
            made = cls(float(mean), float(deviation or 0))
        except ValueError:
            made = cls(0)
        if not (1 <= made.mean <= _LONGEST and 0 <= made.deviation <= _LONGEST):
            raise UsageError(f"{text!r} is no length", mend="give a mean, or mean,deviation")
        return made


@dataclass(frozen=True)
class Prompts:
    """Where prompts come from: a file, or made up; and how long they and answers are to be."""

    dataset: Path | None = None
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    max_input_tokens: int | None = None

    def describe(self, counter: Counter) -> str:
        """Say in words what the prompts are."""
        if self.dataset is not None:
            return self.dataset.name
        wanted = self.input_tokens or DEFAULT_INPUT
        spread = f" ± {wanted.deviation:g}" if wanted.deviation else ""
        return f"made up, {wanted.mean:g}{spread} tokens ({counter.source})"


DEFAULT_INPUT = Lengths(32)


def plan_requests(
    load: Load, prompts: Prompts, counter: Counter, *, ours: bool
) -> tuple[tuple[Ask, ...], tuple[Ask, ...]]:
    """Give the warm-up and the requests themselves.

    Where an answer is to have a certain length, models of llmserve (``ours``) are told to go on
    past their own end, so that it really has.
    """
    draw = random.Random(f"prompts {load.seed}")  # noqa: S311
    times = _times(load)
    count = load.requests if times is None else len(times)
    samples = _samples(prompts, counter, count or DISTINCT, draw)
    if count is None:
        count = len(samples)
    asks = []
    for at in range(count):
        sample = samples[at % len(samples)]
        options = _options(load.options, sample, prompts, counter, draw, ours=ours)
        asks.append(Ask(at, sample.prompt, options, times[at] if times else None))
    return tuple(_warmup(load, prompts, counter, asks, ours=ours)), tuple(asks)


def _warmup(
    load: Load, prompts: Prompts, counter: Counter, asks: Sequence[Ask], *, ours: bool
) -> list[Ask]:
    """Repeat what is measured, with other words where they are made up.

    A server may keep what it has read of a prompt, and would be done with it sooner.
    """
    if not asks or prompts.dataset is not None:
        return [asks[at % len(asks)] for at in range(load.warmup)] if asks else []
    draw = random.Random(f"warm-up {load.seed}")  # noqa: S311
    samples = _samples(prompts, counter, load.warmup, draw)
    return [
        Ask(at, sample.prompt, _options(load.options, sample, prompts, counter, draw, ours=ours))
        for at, sample in enumerate(samples[at % len(samples)] for at in range(load.warmup))
    ]


def _times(load: Load) -> list[float] | None:
    if load.rate is None:
        return None
    kind = load.arrivals or "poisson"
    if load.requests is None and load.rate * (load.duration or 0.0) > _MOST:
        raise UsageError(
            f"{load.rate:g} a second for {load.duration:g} s are more than {_MOST:,} requests",
            mend="lower the rate or the duration",
        )
    return arrival_times(kind, load.rate, load.seed, count=load.requests, duration=load.duration)


def _samples(prompts: Prompts, counter: Counter, count: int, draw: random.Random) -> list[Sample]:
    if prompts.dataset is None:
        wanted = prompts.input_tokens or DEFAULT_INPUT
        return [
            Sample(make_prompt(counter, draw_length(wanted.mean, wanted.deviation, draw), draw))
            for _ in range(min(count, 4 * DISTINCT))
        ]
    samples = read_dataset(prompts.dataset)
    most = prompts.max_input_tokens
    if most is not None:
        samples = [sample for sample in samples if counter.count(sample.prompt) <= most]
        if not samples:
            raise UsageError(
                f"{prompts.dataset} holds no prompt of at most {most} tokens",
                mend="raise --max-input-tokens",
            )
    return samples


def _options(
    given: Mapping[str, Any],
    sample: Sample,
    prompts: Prompts,
    counter: Counter,
    draw: random.Random,
    *,
    ours: bool,
) -> dict[str, Any]:
    length = sample.output_tokens
    if prompts.output_tokens is not None:
        wanted = prompts.output_tokens
        length = draw_length(wanted.mean, wanted.deviation, draw)
    elif length is None and sample.answer is not None:
        length = max(1, counter.count(sample.answer))
    if length is None:
        return dict(given)
    options: dict[str, Any] = {"max_tokens": length}
    if ours:
        options["ignore_eos"] = True
    return {**options, **given}
