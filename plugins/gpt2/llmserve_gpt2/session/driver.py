"""The session stage: prompts come in once, tokens are made a few at a time, nothing is mixed up.

Triton's sequence batcher hands over a request of every sequence that has one. Their answers are
made together, a token of each at a time, and every request is answered as soon as it has what
it asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.runtime import Parts, RequestError, Responder, tensors_of
from llmserve_gpt2.session.graph import END, START, Graph, Turn
from llmserve_gpt2.session.sequences import ClientSequence, Sequences, StepRequest, open_sequence

# Of a batch's time, what may be spent on bringing sequences together.
_SMALL_PART = 0.05


@dataclass
class PendingRequest:
    """A request under way, and how many tokens it still gets."""

    raw: Any
    sequence: ClientSequence
    left: int
    failed: bool = False

    @property
    def going(self) -> bool:
        return self.left > 0 and not self.sequence.generation.done

    @property
    def last(self) -> bool:
        """Whether the sequence surely ends with the next token."""
        generation = self.sequence.generation
        by_length = len(generation.token_ids) + 1 >= generation.max_tokens
        return by_length or (self.left == 1 and bool(self.raw.flags() & END))


class SessionDriver:
    """Answers the requests of sequences; the runtime of the batchings of this plugin."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        folder: Path,
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        del folder
        # Read here, so that what another version built is refused when it is loaded.
        self._most_tokens, self._resent = settings["most_tokens"], settings["resent"]
        self._wait = settings["wait_seconds"]
        self._pause = pause
        self._sequences = Sequences(slots=settings["slots"], idle_seconds=settings["idle_seconds"])
        self._closing: list[ClientSequence] = []

    def start(self, parts: Parts) -> None:
        self._parts = parts
        self._graph: Graph = parts.generator

    def execute(self, requests: Sequence[Any]) -> None:
        """Answer every request of a batch; the answers leave through their senders."""
        now = time.monotonic()
        self._closing += self._sequences.sweep(now)
        asked = [one for raw in requests if (one := self._arrive(raw, now)) is not None]
        while going := [one for one in asked if one.going]:
            self._step(going)
            for one in going:
                if not one.going:
                    self._answer(one)
        if self._closing:
            self._step([])
        self._wait_for_the_others([one.sequence for one in asked], now)

    def finalize(self) -> None:
        self._graph.close()

    def _wait_for_the_others(self, answered: Sequence[ClientSequence], began: float) -> None:
        """Let who was just answered ask again before those begin who waited meanwhile.

        Else two groups of sequences would take turns for ever: whoever misses a batch comes while
        the next is under way, and each then runs with half of the rows.
        """
        ended = time.monotonic()
        took = ended - began
        for sequence in answered:
            sequence.seen = ended
        if self._sequences.apart(answered, since=began - took):
            self._pause(min(self._wait, _SMALL_PART * took))

    def _arrive(self, raw: Any, now: float) -> PendingRequest | None:
        """Match a request with its sequence; who needs no step is answered at once."""
        tensors = tensors_of(raw)
        if not tensors["READY"].any():
            # It only fills a slot whose sequence has no request now; Triton wants an answer.
            self._send(raw, self._piece_of(None))
            return None
        key, flags = raw.correlation_id(), raw.flags()
        try:
            request = StepRequest.read(tensors)
            if flags & START:
                sequence = open_sequence(request, self._parts, self._graph.sequence(), now)
                self._closing += self._sequences.start(key, sequence)
            elif flags & END and request.step == 0:
                self._forget(key)
                self._send(raw, self._piece_of(None))
                return None
            else:
                sequence = self._sequences.step(key, now)
                sequence = self._continued(key, sequence, request, now)
        except Exception as error:
            # A step that asks for nonsense leaves its sequence as it was.
            if flags & (START | END) or not isinstance(error, RequestError):
                self._forget(key)
            Responder(raw, self._parts).fail(error)
            return None
        step = 1 if request.step is None else request.step
        one = PendingRequest(raw, sequence, min(step, self._most_tokens))
        if not one.going:
            self._answer(one)
        return one

    def _continued(
        self, key: Any, sequence: ClientSequence, request: StepRequest, now: float
    ) -> ClientSequence:
        """Go on with a sequence, or begin anew where the text that is resent has changed."""
        if not self._resent:
            request.refuse_as_step(sequence.generation.params)
            return sequence
        if request.prompt == sequence.generation.prompt + sequence.generation.text:
            return sequence
        anew = open_sequence(request, self._parts, self._graph.sequence(), now)
        self._closing += self._sequences.start(key, anew)
        return anew

    def _step(self, going: Sequence[PendingRequest]) -> None:
        """Make a token for everyone, and tell the generator who is gone."""
        gone = [sequence for sequence in self._closing if sequence.open]
        self._closing.clear()
        turns = [
            Turn(one.sequence.number, one.sequence.lane, one.sequence.feed(), one.last)
            for one in going
        ]
        turns += [Turn(sequence.number, sequence.lane, [0], True) for sequence in gone]
        if not turns:
            return
        answers = self._graph.step(turns, self._parts.pb_utils)
        for one, turn, logits in zip(going, turns, answers, strict=False):
            one.sequence.ended = turn.ends
            try:
                if isinstance(logits, Exception):
                    raise logits
                one.sequence.generation.push(one.sequence.sampler.choose(logits))
            except Exception as error:
                self._fail(one, error)
                continue
            one.left -= 1
            if one.sequence.generation.done:
                self._closing.append(one.sequence)

    def _fail(self, one: PendingRequest, error: Exception) -> None:
        """Give up one sequence; the others of the step know nothing of it."""
        one.left, one.failed = 0, True
        self._forget(one.raw.correlation_id())
        Responder(one.raw, self._parts).fail(error)

    def _answer(self, one: PendingRequest) -> None:
        if one.failed:
            return
        if one.raw.flags() & END:
            self._forget(one.raw.correlation_id())
        self._send(one.raw, self._piece_of(one.sequence))

    def _piece_of(self, sequence: ClientSequence | None) -> dict[str, Any]:
        if sequence is None:
            return {"piece": "", "so_far": "", "echo": "", "reason": "", "counts": [0, 0]}
        generation = sequence.generation
        echo = generation.prompt if sequence.echo and not generation.taken else ""
        return {
            "piece": generation.take(),
            "so_far": generation.text,
            "echo": echo,
            "reason": generation.finish_reason or "",
            "counts": [len(generation.prompt_ids), len(generation.token_ids)],
        }

    def _forget(self, key: Any) -> None:
        if (sequence := self._sequences.end(key)) is not None:
            self._closing.append(sequence)

    def _send(self, raw: Any, values: Mapping[str, Any]) -> None:
        pb = self._parts.pb_utils
        tensors = [
            pb.Tensor(name, np.array([value], np.int32))
            if isinstance(value, list)
            else pb.Tensor(name, np.array([[value.encode()]], np.object_))
            for name, value in values.items()
        ]
        response = pb.InferenceResponse(output_tensors=tensors)
        raw.get_response_sender().send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
