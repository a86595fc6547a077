"""Who is under way: sequences by their ids, from their start to their end or their time-out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.sampling import Sampler
from llmserve_gpt2.session.cache import Lane


@dataclass
class Sequence:
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
        """Whether the generator holds a cache for it."""
        return self.lane.real > 0 and not self.ended

    def feed(self) -> list[int]:
        """Return the tokens that the generator has not seen."""
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
        self._known: dict[Hashable, Sequence] = {}

    def __len__(self) -> int:
        return len(self._known)

    def start(self, key: Hashable, sequence: Sequence) -> list[Sequence]:
        """Take a sequence in and return those that had to go for it."""
        gone = [self._known.pop(key)] if key in self._known else []
        while len(self._known) >= self._slots:
            oldest = min(self._known, key=lambda other: self._known[other].seen)
            gone.append(self._known.pop(oldest))
        self._known[key] = sequence
        return gone

    def step(self, key: Hashable, now: float) -> Sequence:
        """Return the sequence of a request, which is alive as of now."""
        sequence = self._known.get(key)
        if sequence is None:
            raise RequestError(
                f"there is no sequence {key} here: it has ended, was idle for more than "
                f"{self._idle:g} s, or was never started; begin with sequence_start"
            )
        sequence.seen = now
        return sequence

    def apart(self, together: Iterable[Sequence], since: float) -> bool:
        """Say whether others than these have been seen since a moment, and so will come again."""
        here = {id(sequence) for sequence in together}
        return any(
            one.seen >= since and id(one) not in here and not one.generation.done
            for one in self._known.values()
        )

    def end(self, key: Hashable) -> Sequence | None:
        """Forget a sequence, if there is one."""
        return self._known.pop(key, None)

    def sweep(self, now: float) -> Iterator[Sequence]:
        """Give up what has been idle for too long."""
        for key in [key for key, one in self._known.items() if now - one.seen > self._idle]:
            yield self._known.pop(key)

    def clear(self) -> list[Sequence]:
        """Give up everything."""
        gone = list(self._known.values())
        self._known.clear()
        return gone
