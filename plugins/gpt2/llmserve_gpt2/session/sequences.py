"""Sequences of clients: what is asked for in them, what was said, and how long their caches are.

Triton knows nothing of the lengths of states, and its native backends take all rows of a batch
to be as long as the first. So the lengths are made equal here: who has less gets a gap in
front, which the mask hides.
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

FIRST = 1
"""What a state begins with: one slot of zeros, for Triton has no state of no length."""


@dataclass
class Lane:
    """A sequence's cache: ``held`` slots, the last ``real`` of which are tokens of its text."""

    held: int = FIRST
    real: int = 0

    def positions(self, new: int) -> npt.NDArray[np.int64]:
        return np.arange(self.real, self.real + new, dtype=np.int64)

    def mask(self, new: int, room: int) -> npt.NDArray[np.int64]:
        """Return what may be looked at, the new tokens included."""
        mask = np.zeros(room, np.int64)
        mask[room - self.real - new :] = 1
        return mask

    def grow(self, new: int, room: int) -> None:
        self.held = room
        self.real += new


def rooms(lanes: Sequence[Lane], news: Sequence[int], *, longest: int, gap: int) -> list[int]:
    """Say how long each cache shall be after the next step.

    All become as long as the longest, so that later steps are made in one batch; but nobody
    gets a gap that costs more than a batch of one's own, and nobody is drawn beyond
    ``longest``, or sequences that come and go would draw each other on for ever.

    >>> rooms([Lane(9, 8), Lane(3, 2)], [1, 1], longest=64, gap=64)
    [10, 10]
    """
    needed = [lane.held + new for lane, new in zip(lanes, news, strict=True)]
    chosen = []
    for need in needed:
        others = [room for room in needed if need <= room <= min(longest, need + gap)]
        chosen.append(max(others, default=need))
    return chosen


@dataclass(frozen=True)
class StepRequest:
    """One request as the first stage has read it; ``step`` is how many tokens it asks for."""

    prompt: str
    ids: tuple[int, ...]
    params: Params
    step: int | None

    def write(self) -> str:
        plain = asdict(Params())
        asked = {name: value for name, value in asdict(self.params).items() if value != plain[name]}
        asked.pop("extra", None)
        return json.dumps({"prompt": self.prompt, "params": asked, "step": self.step})

    @classmethod
    def read(cls, tensors: Tensors) -> StepRequest:
        """Read what :meth:`write` wrote, with the ids that came beside it."""
        said: Mapping[str, Any] = json.loads(tensors["params"].reshape(-1)[0])
        ids = tuple(int(token) for token in tensors["prompt_ids"].reshape(-1) if token >= 0)
        return cls(said["prompt"], ids, read_params(said["params"]), said["step"])

    def refuse_as_step(self, begun: Params) -> None:
        """Refuse what belongs to the start of a sequence: nobody would heed it later."""
        if self.prompt or self.ids:
            raise RequestError("the prompt is sent once, with sequence_start; leave it out later")
        plain, now, then = asdict(Params()), asdict(self.params), asdict(begun)
        for name, value in now.items():
            if value not in (plain[name], then[name]):
                raise RequestError(f"{name} is said with sequence_start, and holds to the end")


@dataclass
class ClientSequence:
    """One answer on its way: what was said, where its cache is, who asked last."""

    generation: Generation
    sampler: Sampler
    number: int
    """Its id in the generator."""
    seen: float
    lane: Lane = field(default_factory=Lane)
    echo: bool = False
    ended: bool = False
    """Whether the generator has been told of its end, or never heard of it."""

    @property
    def open(self) -> bool:
        return self.lane.real > 0 and not self.ended

    def feed(self) -> list[int]:
        tokens = self.generation.prompt_ids + self.generation.token_ids
        return tokens[self.lane.real :]


class Sequences:
    """At most ``slots`` sequences, each of which is given up once it is idle for too long.

    Triton does not tell a model that a sequence has timed out, so the time is kept here as well;
    and since Triton lets no more than ``slots`` in, one too many means that the one that was
    idle longest is gone.
    """

    def __init__(self, *, slots: int, idle_seconds: float) -> None:
        self._slots = slots
        self._idle = idle_seconds
        self._known: dict[Hashable, ClientSequence] = {}

    def start(self, key: Hashable, sequence: ClientSequence) -> list[ClientSequence]:
        """Take a sequence in and return those that had to go for it."""
        gone = [self._known.pop(key)] if key in self._known else []
        while len(self._known) >= self._slots:
            oldest = min(self._known, key=lambda other: self._known[other].seen)
            gone.append(self._known.pop(oldest))
        self._known[key] = sequence
        return gone

    def step(self, key: Hashable, now: float) -> ClientSequence:
        """Return the sequence of a request, which is alive as of now."""
        sequence = self._known.get(key)
        if sequence is None:
            raise RequestError(
                f"there is no sequence {key} here: it has ended, was idle for more than "
                f"{self._idle:g} s, or was never started; begin with sequence_start"
            )
        sequence.seen = now
        return sequence

    def apart(self, together: Iterable[ClientSequence], since: float) -> bool:
        """Say whether others than these have been seen since a moment, and so will come again."""
        here = {id(sequence) for sequence in together}
        return any(
            one.seen >= since and id(one) not in here and not one.generation.done
            for one in self._known.values()
        )

    def end(self, key: Hashable) -> ClientSequence | None:
        return self._known.pop(key, None)

    def sweep(self, now: float) -> Iterator[ClientSequence]:
        for key in [key for key, one in self._known.items() if now - one.seen > self._idle]:
            yield self._known.pop(key)


def open_sequence(request: StepRequest, parts: Parts, number: int, now: float) -> ClientSequence:
    params = request.params
    if not request.ids and not params.prompt_only:
        raise RequestError("text_input is empty: send at least one character")
    prompt = Prompt(request.prompt, list(request.ids), params)
    context = parts.generator.context_length
    limit = answer_limit(prompt, context, parts.defaults["max_tokens"])
    eos = parts.generator.eos_ids | parts.tokenizer.eos_ids
    if params.end_id is not None and params.end_id >= 0:
        eos = frozenset({params.end_id})
    generation = Generation(
        prompt.ids,
        params,
        max_tokens=limit,
        eos_ids=eos,
        decode=parts.tokenizer.decode,
        prompt=prompt.text,
    )
    if params.prompt_only:
        generation.tell(about_prompt(prompt, parts))
    exclude = params.exclude_input_in_output
    echo = bool(parts.defaults.get("echo")) if exclude is None else not exclude
    return ClientSequence(generation, Sampler(generation, parts.tokenizer), number, now, echo=echo)
