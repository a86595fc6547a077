"""Clients' sequences: their requests, their texts, and the lengths of their caches.

Triton does not check the lengths of states, and its native backends assume that all rows of a batch
are as long as the first. So the lengths are made equal here: a shorter cache gets a gap in front,
which the mask hides.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime import (
    Generation,
    Params,
    Parts,
    Prompt,
    RequestError,
    Sampler,
    Tensors,
    about_prompt,
    answer_limit,
    read_params,
)
from llmserve.runtime.contract import parse_json

INITIAL_LENGTH = 1
"""A state starts with one slot of zeros, because Triton has no empty states."""


@dataclass
class Cache:
    """A sequence's cache: ``length`` slots, of which the last ``tokens`` contain its text."""

    length: int = INITIAL_LENGTH
    tokens: int = 0

    def positions(self, new: int) -> npt.NDArray[np.int64]:
        return np.arange(self.tokens, self.tokens + new, dtype=np.int64)

    def mask(self, new: int, length: int) -> npt.NDArray[np.int64]:
        """Return the mask of the slots with tokens, including the new ones."""
        mask = np.zeros(length, np.int64)
        mask[length - self.tokens - new :] = 1
        return mask

    def grow(self, new: int, length: int) -> None:
        self.length = length
        self.tokens += new


def next_lengths(
    caches: Sequence[Cache], counts: Sequence[int], *, longest: int, gap: int
) -> list[int]:
    """Return the length of each cache after the next step.

    All become as long as the longest one, so that later steps run in one batch; but no sequence
    gets a gap that costs more than a separate batch, and none is extended beyond ``longest``,
    because sequences that come and go would otherwise extend each other forever.

    >>> next_lengths([Cache(9, 8), Cache(3, 2)], [1, 1], longest=64, gap=64)
    [10, 10]
    """
    minima = [cache.length + new for cache, new in zip(caches, counts, strict=True)]
    lengths = []
    for minimum in minima:
        limit = min(longest, minimum + gap)
        lengths.append(max((n for n in minima if minimum <= n <= limit), default=minimum))
    return lengths


@dataclass(frozen=True)
class StepRequest:
    """A request as read by the first stage; ``step`` is the requested number of tokens."""

    prompt: str
    ids: tuple[int, ...]
    params: Params
    step: int | None

    def write(self) -> str:
        defaults = asdict(Params())
        values = asdict(self.params)
        params = {name: value for name, value in values.items() if value != defaults[name]}
        params.pop("extra", None)
        return json.dumps({"prompt": self.prompt, "params": params, "step": self.step})

    @classmethod
    def read(cls, tensors: Tensors) -> StepRequest:
        """Read the output of :meth:`write`, and the ids that are sent with it."""
        content: Mapping[str, Any] = parse_json(tensors["params"].reshape(-1)[0])
        ids = tuple(int(token) for token in tensors["prompt_ids"].reshape(-1) if token >= 0)
        return cls(content["prompt"], ids, read_params(content["params"]), content["step"])

    def refuse_as_step(self, initial: Params) -> None:
        """Refuse parameters that belong to the start of a sequence: later they have no effect."""
        if self.prompt or self.ids:
            raise RequestError("the prompt is sent once, with sequence_start; leave it out later")
        defaults, initial_values = asdict(Params()), asdict(initial)
        for name, value in asdict(self.params).items():
            if value not in (defaults[name], initial_values[name]):
                problem = f"{name} must be set with sequence_start; leave it out later"
                raise RequestError(problem, code="conflicting_options", param=name)


@dataclass
class ClientSequence:
    """A sequence of a client: its answer so far, its cache, and when it was last active."""

    generation: Generation
    sampler: Sampler
    number: int
    """The sequence's id in the generator."""
    last_active: float
    cache: Cache = field(default_factory=Cache)
    echo: bool = False
    ended: bool = False
    """Whether the sequence has been ended in the generator."""

    @property
    def open_in_generator(self) -> bool:
        return self.cache.tokens > 0 and not self.ended

    def new_tokens(self) -> list[int]:
        tokens = self.generation.prompt_ids + self.generation.token_ids
        return tokens[self.cache.tokens :]


class Sequences:
    """At most ``slots`` sequences, each of which is dropped when it is idle for too long.

    Triton does not notify a model that a sequence has timed out, so the idle time is measured here
    too. Triton admits at most ``slots`` sequences, so one more means that the sequence that has
    been idle longest has timed out.
    """

    def __init__(self, *, slots: int, idle_seconds: float) -> None:
        self._slots = slots
        self._max_idle = idle_seconds
        self._by_key: dict[Hashable, ClientSequence] = {}

    def start(self, key: Hashable, sequence: ClientSequence) -> list[ClientSequence]:
        """Add a sequence and return those that it replaces."""
        replaced = [self._by_key.pop(key)] if key in self._by_key else []
        while len(self._by_key) >= self._slots:
            oldest = min(self._by_key, key=lambda other: self._by_key[other].last_active)
            replaced.append(self._by_key.pop(oldest))
        self._by_key[key] = sequence
        return replaced

    def step(self, key: Hashable, now: float) -> ClientSequence:
        """Return the sequence of a request, and mark it as active."""
        sequence = self._by_key.get(key)
        if sequence is None:
            raise RequestError(
                f"there is no sequence {key} here: it has ended, was idle for more than "
                f"{self._max_idle:g} s, or was never started; begin with sequence_start"
            )
        sequence.last_active = now
        return sequence

    def has_others(self, sequences: Iterable[ClientSequence], since: float) -> bool:
        """Return whether other unfinished sequences were active since a time."""
        excluded = {id(sequence) for sequence in sequences}
        return any(
            other.last_active >= since and id(other) not in excluded and not other.generation.done
            for other in self._by_key.values()
        )

    def end(self, key: Hashable) -> ClientSequence | None:
        return self._by_key.pop(key, None)

    def expire(self, now: float) -> Iterator[ClientSequence]:
        for key, sequence in list(self._by_key.items()):
            if now - sequence.last_active > self._max_idle:
                yield self._by_key.pop(key)


def open_sequence(request: StepRequest, parts: Parts, number: int, now: float) -> ClientSequence:
    params = request.params
    if not request.ids and not params.prompt_only:
        problem = "text_input is empty: send at least one character"
        raise RequestError(problem, code="empty_prompt", param="text_input")
    prompt = Prompt(request.prompt, list(request.ids), params)
    context = parts.generator.context_length
    limit = answer_limit(prompt, context, parts.defaults["max_tokens"])
    generation = Generation(
        prompt.ids,
        params,
        max_tokens=limit,
        eos_ids=params.ends(parts.generator.eos_ids | parts.tokenizer.eos_ids),
        decode=parts.tokenizer.decode,
        prompt=prompt.text,
    )
    if params.prompt_only:
        generation.tell(about_prompt(prompt, parts))
    exclude = params.exclude_input_in_output
    echo = bool(parts.defaults.get("echo")) if exclude is None else not exclude
    return ClientSequence(generation, Sampler(generation, parts.tokenizer), number, now, echo=echo)
