"""The requests of a run, decided before it starts: the same seed gives the same requests."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import UsageError
from llmserve_bench.dataset import Sample, read_dataset
from llmserve_bench.results import Load
from llmserve_bench.tokens import TokenCounter

_LONGEST = 1_000_000
_MOST_REQUESTS = 10_000_000
DISTINCT = 256
"""Synthetic prompts made for a duration; after that many they repeat."""
_TEXT = (
    "the a of to and in is that it was for on are with as they be at "
    "one have this from or had by hot word but what some we can out other were all "
    "there when up use your how said an each she which do their time if will way about "
    "many then them write would like so these her long make thing see him two has look more "
    "day could go come did number sound no most people my over know water than call first who "
    "may down side been now find any new work part take get"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Request:
    """A request to send; ``due`` is when, in seconds from the start, under a rate."""

    index: int
    prompt: str
    options: Mapping[str, Any]
    due: float | None = None


@dataclass(frozen=True)
class Lengths:
    """A mean and a standard deviation of tokens."""

    mean: float
    deviation: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read what ``--input-tokens`` takes: ``128`` or ``128,16``."""
        mean, _, deviation = text.partition(",")
        try:
            lengths = cls(float(mean), float(deviation or 0))
        except ValueError:
            lengths = cls(0)
        if not (1 <= lengths.mean <= _LONGEST and 0 <= lengths.deviation <= _LONGEST):
            raise UsageError(f"{text!r} is not a length", mend="give a mean, or mean,deviation")
        return lengths

    def draw(self, random: random.Random) -> int:
        return max(1, round(random.gauss(self.mean, self.deviation)))


@dataclass(frozen=True)
class Prompts:
    """Where prompts come from, a file or made up, and how long they and the answers are to be."""

    dataset: Path | None = None
    input_tokens: Lengths = Lengths(32)
    output_tokens: Lengths | None = None
    max_input_tokens: int | None = None

    def describe(self, counter: TokenCounter) -> str:
        """Say in words what is asked."""
        if self.dataset is not None:
            return self.dataset.name
        lengths = self.input_tokens
        spread = f" ± {lengths.deviation:g}" if lengths.deviation else ""
        return f"synthetic, {lengths.mean:g}{spread} tokens ({counter.source})"

    def samples(self, counter: TokenCounter, count: int, draw: random.Random) -> list[Sample]:
        """Read the prompts, or make up so many of them."""
        if self.dataset is None:
            lengths = [self.input_tokens.draw(draw) for _ in range(min(count, 4 * DISTINCT))]
            return [Sample(make_prompt(counter, length, draw)) for length in lengths]
        most = self.max_input_tokens
        samples = read_dataset(self.dataset)
        fitting = [one for one in samples if most is None or counter.count(one.prompt) <= most]
        if not fitting:
            problem = f"{self.dataset} holds no prompt of at most {most} tokens"
            raise UsageError(problem, mend="raise --max-input-tokens")
        return fitting

    def output_length(
        self, sample: Sample, counter: TokenCounter, draw: random.Random
    ) -> int | None:
        """Say how long the answer to a prompt is to be; None where that is the model's to say."""
        if self.output_tokens is not None:
            return self.output_tokens.draw(draw)
        if sample.output_tokens is None and sample.answer is not None:
            return max(1, counter.count(sample.answer))
        return sample.output_tokens


def arrival_times(load: Load) -> list[float]:
    """Give arrival times in seconds, as many as asked for or for as long as asked for.

    >>> arrival_times(Load(rate=4.0, arrivals="constant", requests=3))
    [0.0, 0.25, 0.5]
    """
    rate, count, duration = load.rate or 1.0, load.requests, load.duration
    if count is None and rate * (duration or 0.0) > _MOST_REQUESTS:
        problem = f"{rate:g} a second for {duration:g} s are more than {_MOST_REQUESTS:,} requests"
        raise UsageError(problem, mend="lower the rate or the duration")
    draw = random.Random(f"arrivals {load.seed}")  # noqa: S311
    times: list[float] = []
    at = 0.0
    while (count is None or len(times) < count) and (duration is None or at < duration):
        times.append(at)
        # From the count and not from the last time, so that rounding errors do not add up.
        at = len(times) / rate if load.arrivals == "constant" else at + draw.expovariate(rate)
    return times


def make_schedule(
    load: Load, prompts: Prompts, counter: TokenCounter, *, ignore_eos: bool
) -> tuple[list[Request], list[Request]]:
    """Give the requests of the warm-up and those of the run.

    With ``ignore_eos`` answers of a given length go on past the model's own end of text, so that
    they really have that length.
    """
    times = arrival_times(load) if load.rate is not None else None
    count = load.requests if times is None else len(times)
    draw = random.Random(f"prompts {load.seed}")  # noqa: S311
    samples = prompts.samples(counter, count or DISTINCT, draw)

    def request(at: int, due: float | None = None) -> Request:
        sample = samples[at % len(samples)]
        length = prompts.output_length(sample, counter, draw)
        options: dict[str, Any] = {} if length is None else {"max_tokens": length}
        if length is not None and ignore_eos:
            options["ignore_eos"] = True
        return Request(at, sample.prompt, {**options, **load.options}, due)

    total = len(samples) if count is None else count
    requests = [request(at, times[at] if times else None) for at in range(total)]
    if prompts.dataset is None:
        # Other words than in the run: a server may keep what it has read of a prompt.
        samples = prompts.samples(counter, load.warmup, draw)
    return [request(at) for at in range(load.warmup)], requests


def make_prompt(counter: TokenCounter, tokens: int, draw: random.Random) -> str:
    """Make a prompt of so many tokens by the model's own count, or as near as it allows."""
    # Every word is at least one token, so these are enough; a search finds how many of them fit.
    words = [draw.choice(_WORDS).capitalize(), *draw.choices(_WORDS, k=max(0, tokens - 1))]
    fit, beyond = 1, len(words) + 1
    while beyond - fit > 1:
        middle = (fit + beyond) // 2
        if counter.count(" ".join(words[:middle])) <= tokens:
            fit = middle
        else:
            beyond = middle
    best = " ".join(words[:fit])
    for _ in range(64):
        if counter.count(best) == tokens:
            break
        longer = f"{best} {draw.choice(_WORDS)}"
        if counter.count(longer) <= tokens:
            best = longer
    return best
