"""The requests to send and their schedule, fixed before a run: one seed, the same requests.

Prompts are synthetic, or come from a file: a JSON list of objects, JSON lines, or plain text with
one prompt per line. An object has its prompt under ``input`` (which an ``instruction`` may follow,
as in the data sets of TensorRT-LLM's tools), ``prompt``, ``text_input`` or ``text``. The length of
the answer may be set by a text under ``output``, ``completion`` or ``response``, or by a number
under ``output_tokens`` or ``max_tokens``. A chat has all of its ``messages`` beside the prompt.
"""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, PositiveInt, ValidationError

from llmserve.errors import UsageError, reason
from llmserve.plugin import Repository
from llmserve.runtime.contract import ADAPTER
from llmserve_bench.results import Load

_LIST = re.compile(r"\s*\[\s*[\"{]")
_OBJECT = re.compile(r"\s*\{\s*[\"}]")
_LONGEST = 1_000_000
_MOST_SYNTHETIC = 1024
_DISTINCT = 256
"""Number of synthetic prompts for a duration, after which they repeat."""
_MOST_REQUESTS = 10_000_000
_TEXT = (
    "the a of to and in is that it was for on are with as they be at one have this from or had by "
    "hot word but what some we can out other were all there when up use your how said an each she "
    "which do their time if will way about many then them write would like so these her long make "
    "thing see him two has look more day could go come did number sound no most people my over"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class TokenCounter:
    """Counts the tokens of a text with the tokenizer that ``source`` describes."""

    count: Callable[[str], int]
    source: str


ESTIMATE = TokenCounter(
    lambda text: max(1, round(len(text) / 4)), "estimated, 4 characters per token"
)


def find_counter(repository: Path | None, model: str, tokenizer: Path | None) -> TokenCounter:
    """Return a counter for the named tokenizer, or else for the model's own in a local repository.

    That repository need not be the server's: a model with the same name counts as the same.
    """
    if tokenizer is not None:
        settings = {"path": str(tokenizer.absolute())}
        runtime = "llmserve.runtime:TransformersTokenizer"
        return _load_counter(runtime, settings, tokenizer, f"tokenizer of {tokenizer}")
    if repository is not None:
        opened = Repository.open(repository)
        for name in (model, *opened.parts_of(model)):
            manifest = opened.models[name].intact() if name in opened.models else None
            part = manifest.components.get("tokenizer") if manifest else None
            # An ensemble's own manifest only names the choice; the files are in its parts.
            if manifest and part and not manifest.parts:
                folder, source = repository / name / "1", "the model's own tokenizer"
                return _load_counter(part["runtime"], part["settings"], folder, source)
    return ESTIMATE


def _load_counter(runtime: str, settings: object, folder: Path, source: str) -> TokenCounter:
    try:
        tokenizer = resolve_name(runtime)(settings, folder)
    except Exception as error:
        raise UsageError(
            f"the tokenizer in {folder} cannot be read: {reason(error)}",
            hint="install what the model needs, or name another folder with --tokenizer",
        ) from None
    return TokenCounter(lambda text: len(tokenizer.encode(text)), source)


class Sample(BaseModel, frozen=True, strict=True, populate_by_name=True):
    prompt: str = Field(validation_alias=AliasChoices("input", "prompt", "text_input", "text"))
    instruction: str = ""
    messages: list[dict[str, Any]] = []
    answer: str | None = Field(
        default=None, validation_alias=AliasChoices("output", "completion", "response")
    )
    output_tokens: PositiveInt | None = Field(
        default=None, validation_alias=AliasChoices("output_tokens", "max_tokens")
    )

    @property
    def text(self) -> str:
        return f"{self.prompt} {self.instruction}" if self.instruction else self.prompt


@dataclass(frozen=True)
class Lengths:
    mean: float
    deviation: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse the value of ``--input-tokens``: ``128`` or ``128,16``."""
        mean, _, deviation = text.partition(",")
        try:
            lengths = cls(float(mean), float(deviation or 0))
        except ValueError:
            lengths = cls(0)
        if not (1 <= lengths.mean <= _LONGEST and 0 <= lengths.deviation <= _LONGEST):
            raise UsageError(f"{text!r} is not a length", hint="give a mean, or mean,deviation")
        return lengths

    def draw(self, random: random.Random) -> int:
        return max(1, round(random.gauss(self.mean, self.deviation)))


@dataclass(frozen=True)
class Prompts:
    """The source of the prompts, and the lengths of prompts and answers."""

    dataset: Path | None = None
    input_tokens: Lengths = Lengths(32)
    output_tokens: Lengths | None = None
    max_input_tokens: int | None = None

    def describe(self, counter: TokenCounter) -> str:
        if self.dataset is not None:
            return self.dataset.name
        lengths = self.input_tokens
        spread = f" ± {lengths.deviation:g}" if lengths.deviation else ""
        return f"synthetic, {lengths.mean:g}{spread} tokens ({counter.source})"

    def samples(self, counter: TokenCounter, count: int, draw: random.Random) -> list[Sample]:
        if self.dataset is None:
            lengths = [self.input_tokens.draw(draw) for _ in range(min(count, _MOST_SYNTHETIC))]
            return [Sample(prompt=make_prompt(counter, length, draw)) for length in lengths]
        most = self.max_input_tokens
        samples = read_dataset(self.dataset)
        fitting = [s for s in samples if most is None or counter.count(s.text) <= most]
        if not fitting:
            problem = f"{self.dataset} contains no prompt of at most {most} tokens"
            raise UsageError(problem, hint="raise --max-input-tokens")
        return fitting

    def output_length(
        self, sample: Sample, counter: TokenCounter, draw: random.Random
    ) -> int | None:
        """Return the length of the answer to a prompt; None if the model decides."""
        if self.output_tokens is not None:
            return self.output_tokens.draw(draw)
        if sample.output_tokens is None and sample.answer is not None:
            return max(1, counter.count(sample.answer))
        return sample.output_tokens


def make_prompt(counter: TokenCounter, tokens: int, draw: random.Random) -> str:
    """Make a prompt of this many tokens by the counter, or as close as possible."""
    # Every word is at least one token, so these are enough; a search finds how many fit.
    words = [draw.choice(_WORDS).capitalize(), *draw.choices(_WORDS, k=max(0, tokens - 1))]
    fit = bisect_right(
        range(2, len(words) + 1), tokens, key=lambda n: counter.count(" ".join(words[:n]))
    )
    best = " ".join(words[: 1 + fit])
    for _ in range(64):
        if counter.count(best) == tokens:
            break
        longer = f"{best} {draw.choice(_WORDS)}"
        if counter.count(longer) <= tokens:
            best = longer
    return best


def read_dataset(path: Path) -> list[Sample]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        problem = f"{path} is not UTF-8 text (byte {error.start})"
        raise UsageError(problem, hint="save it as UTF-8") from None
    # Not splitlines, which also splits at characters that editors do not treat as line ends.
    numbered = enumerate(text.split("\n"), 1)
    lines = [(f"{path}, line {at}", line.rstrip("\r")) for at, line in numbered if line.strip()]
    if not lines:
        raise UsageError(f"{path} contains no prompts")
    # A plain prompt may begin with a bracket as well: "[1] is a footnote".
    if _LIST.match(text):
        entries = enumerate(_json(text, f"{path}"), 1)
        return [_sample(entry, f"{path}, entry {at}") for at, entry in entries]
    if _OBJECT.match(lines[0][1]):
        return [_sample(_json(line, place), place) for place, line in lines]
    return [Sample(prompt=line) for _, line in lines]


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        forms = "give a JSON list of objects, one object per line, or one prompt per line"
        raise UsageError(f"{place} is not JSON ({error})", hint=forms) from None


def _sample(entry: Any, place: str) -> Sample:
    try:
        return Sample.model_validate({"prompt": entry} if isinstance(entry, str) else entry)
    except ValidationError as error:
        first = error.errors()[0]
        name = f"{first['loc'][0]}: " if first["loc"] else ""
        hint = "give objects with input (or prompt, text_input, text) and output"
        raise UsageError(f"{place}: {name}{first['msg']}", hint=hint) from None


@dataclass(frozen=True)
class Request:
    """A request to send; with a rate, ``due`` is when, in seconds from the start.

    One to a model that answers with values has ``texts``.
    """

    index: int
    prompt: str
    options: Mapping[str, Any]
    due: float | None = None
    texts: tuple[str, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    """The whole chat, of which ``prompt`` is the end."""
    image: str = ""
    """The file of an image that it shows."""


def arrival_times(load: Load) -> list[float]:
    """Return arrival times in seconds, up to the number of requests or the duration of a load."""
    rate, count, duration = load.rate or 1.0, load.requests, load.duration
    if count is None and rate * (duration or 0.0) > _MOST_REQUESTS:
        problem = f"{rate:g}/s for {duration:g} s is more than {_MOST_REQUESTS:,} requests"
        raise UsageError(problem, hint="lower the rate or the duration")
    draw = random.Random(f"arrivals {load.seed}")  # noqa: S311
    times: list[float] = []
    at = 0.0
    while (count is None or len(times) < count) and (duration is None or at < duration):
        times.append(at)
        # From the count, not from the last time, so that rounding errors do not add up.
        at = len(times) / rate if load.arrivals == "constant" else at + draw.expovariate(rate)
    return times


def make_schedule(
    load: Load, prompts: Prompts, counter: TokenCounter, *, ignore_eos: bool
) -> tuple[list[Request], list[Request]]:
    """Return the requests of the warm-up and those of the run.

    With ``ignore_eos``, answers of a set length continue past the model's own end of text, so that
    they really have that length.
    """
    times = arrival_times(load) if load.rate is not None else None
    count = load.requests if times is None else len(times)
    draw = random.Random(f"prompts {load.seed}")  # noqa: S311
    each = max(1, load.texts)
    samples = prompts.samples(counter, (count or _DISTINCT) * each, draw)

    def request(at: int, due: float | None = None) -> Request:
        if load.texts:
            chosen = [samples[(at * each + i) % len(samples)].text for i in range(each)]
            return Request(at, "", load.options, due, tuple(chosen))
        sample = samples[at % len(samples)]
        length = prompts.output_length(sample, counter, draw)
        options: dict[str, Any] = {} if length is None else {"max_tokens": length}
        if load.adapters and (adapter := load.adapters[at % len(load.adapters)]):
            options[ADAPTER.name] = adapter
        if length is not None and ignore_eos:
            options["ignore_eos"] = True
        messages = tuple(sample.messages)
        image = load.images[at % len(load.images)] if load.images else ""
        options |= load.options
        return Request(at, sample.text, options, due, messages=messages, image=image)

    total = max(1, len(samples) // each) if count is None else count
    requests = [request(at, times[at] if times else None) for at in range(total)]
    if prompts.dataset is None:
        # Different words than in the run: a server may cache prompts.
        samples = prompts.samples(counter, load.warmup * each, draw)
    return [request(at) for at in range(load.warmup)], requests
