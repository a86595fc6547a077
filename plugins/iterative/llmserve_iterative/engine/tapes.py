"""Which passes are played: those of so many single tokens that have come often enough."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from llmserve_iterative.engine.noting import Recorder
from llmserve_iterative.engine.tape import Memory, Tape

LOG = logging.getLogger(__name__)

_MOST_TOKENS = 64
_AFTER = 3


class Tapes:
    """A tape for each number of tokens. Each is made in one pass and on trial in the next.

    Where one does not give bit for bit what the model's own code gives, none is played.
    """

    def __init__(self) -> None:
        self._memory = Memory()
        self._tapes: dict[int, Tape] = {}
        self._seen: Counter[int] = Counter()
        self._allowed = True
        self.played = 0
        """How many passes came from a tape."""

    def play(self, tokens: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return what a pass gives, or nothing if there is no tape of it."""
        if not self._allowed or self._seen[tokens] <= _AFTER:
            return None
        self.played += 1
        return self._result(tokens, inputs)

    def run(
        self, tokens: int, inputs: Sequence[torch.Tensor], code: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Run the model's own code; note it or compare it with a tape, if it is time."""
        if not self._allowed or tokens > _MOST_TOKENS:
            return code()
        self._seen[tokens] += 1
        if self._seen[tokens] == _AFTER:
            return self._note(tokens, inputs, code)
        logits = code()
        if self._seen[tokens] == _AFTER + 1 and not self._agrees(tokens, inputs, logits):
            self._give_up("a tape does not give the same")
        return logits

    def _result(self, tokens: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        tape = self._tapes[tokens]
        for place, values in zip(tape.inputs, inputs, strict=True):
            place.copy_(values)
        return tape.play()

    def _note(
        self, tokens: int, inputs: Sequence[torch.Tensor], code: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        try:
            with Recorder() as recorder:
                logits = code()
            self._tapes[tokens] = Tape(recorder.notes, inputs, logits, self._memory)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return code()
        return logits

    def _agrees(self, tokens: int, inputs: Sequence[torch.Tensor], logits: torch.Tensor) -> bool:
        try:
            return torch.equal(self._result(tokens, inputs), logits)
        except Exception as error:
            LOG.info("a tape fails: %s", error)
            return False

    def _give_up(self, reason: str) -> None:
        LOG.info("this model's passes are not played from tapes: %s", reason)
        self._allowed = False
        self._tapes.clear()
