"""The driver of the session stage: prompts are sent once, tokens generated a few per request.

Triton's sequence batcher passes a batch with at most one request of each sequence. Their answers
are generated together, one token of each per step, and every request is answered as soon as it has
the requested tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.runtime import Parts, RequestError, Responder, tensors_of
from llmserve_gpt2.session.graph import END, START, Graph, StepInput
from llmserve_gpt2.session.sequences import ClientSequence, Sequences, StepRequest, open_sequence

# The share of a batch's duration that may be spent waiting for other sequences.
_MAX_WAIT_SHARE = 0.05


@dataclass
class PendingRequest:
    """A pending request, and how many tokens remain to be generated for it."""

    raw: Any
    sequence: ClientSequence
    remaining: int
    failed: bool = False

    @property
    def active(self) -> bool:
        return self.remaining > 0 and not self.sequence.generation.done

    @property
    def is_last_step(self) -> bool:
        """Whether the sequence is certain to end with the next token."""
        generation = self.sequence.generation
        reaches_limit = len(generation.token_ids) + 1 >= generation.max_tokens
        return reaches_limit or (self.remaining == 1 and bool(self.raw.flags() & END))


class SessionDriver:
    """Answers the requests of sequences; the runtime of this plugin's batchings."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        folder: Path,
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        del folder
        # Settings are read here so that loading fails if another version built the model.
        self._most_tokens, self._resent = settings["most_tokens"], settings["resent"]
        self._max_wait = settings["wait_seconds"]
        self._pause = pause
        self._sequences = Sequences(slots=settings["slots"], idle_seconds=settings["idle_seconds"])
        self._closing: list[ClientSequence] = []

    def start(self, parts: Parts) -> None:
        self._parts = parts
        self._graph: Graph = parts.generator

    def execute(self, requests: Sequence[Any]) -> None:
        """Answer every request of a batch; the answers are sent through their response senders."""
        now = time.monotonic()
        self._closing += self._sequences.expire(now)
        accepted = [self._accept(raw, now) for raw in requests]
        pending = [request for request in accepted if request is not None]
        while active := [request for request in pending if request.active]:
            self._step(active)
            for request in active:
                if not request.active:
                    self._answer(request)
        if self._closing:
            self._step([])
        self._wait_for_next_requests([request.sequence for request in pending], now)

    def finalize(self) -> None:
        self._graph.close()

    def _wait_for_next_requests(self, answered: Sequence[ClientSequence], start: float) -> None:
        """Wait for the next requests of answered sequences if others were active recently.

        Otherwise two groups of sequences would alternate forever: a sequence that misses a batch
        arrives while the next one is running, and each batch then has only half of the rows.
        """
        end = time.monotonic()
        duration = end - start
        for sequence in answered:
            sequence.last_active = end
        if self._sequences.has_others(answered, since=start - duration):
            self._pause(min(self._max_wait, _MAX_WAIT_SHARE * duration))

    def _accept(self, raw: Any, now: float) -> PendingRequest | None:
        """Match a request with its sequence; answer it at once if it needs no step."""
        tensors = tensors_of(raw)
        if not tensors["READY"].any():
            # It only pads the slot of a sequence without a request; Triton expects a response.
            self._send(raw, self._piece_of(None))
            return None
        key, flags = raw.correlation_id(), raw.flags()
        try:
            request = StepRequest.read(tensors)
            if flags & START:
                sequence = open_sequence(request, self._parts, self._graph.sequence(), now)
                self._closing += self._sequences.start(key, sequence)
            elif flags & END and request.step == 0:
                self._end(key)
                self._send(raw, self._piece_of(None))
                return None
            else:
                sequence = self._sequences.step(key, now)
                sequence = self._continue(key, sequence, request, now)
        except Exception as error:
            # An invalid step leaves its sequence unchanged.
            if flags & (START | END) or not isinstance(error, RequestError):
                self._end(key)
            Responder(raw, self._parts).fail(error)
            return None
        step = 1 if request.step is None else request.step
        pending = PendingRequest(raw, sequence, min(step, self._most_tokens))
        if not pending.active:
            self._answer(pending)
        return pending

    def _continue(
        self, key: Any, sequence: ClientSequence, request: StepRequest, now: float
    ) -> ClientSequence:
        """Continue a sequence, or restart it if the text that the client resends has changed."""
        if not self._resent:
            request.refuse_as_step(sequence.generation.params)
            return sequence
        if request.prompt == sequence.generation.prompt + sequence.generation.text:
            return sequence
        restarted = open_sequence(request, self._parts, self._graph.sequence(), now)
        self._closing += self._sequences.start(key, restarted)
        return restarted

    def _step(self, active: Sequence[PendingRequest]) -> None:
        """Generate a token for each request, and end closed sequences in the generator."""
        closing = [sequence for sequence in self._closing if sequence.open_in_generator]
        self._closing.clear()
        inputs = [
            StepInput(r.sequence.number, r.sequence.cache, r.sequence.new_tokens(), r.is_last_step)
            for r in active
        ]
        inputs += [StepInput(sequence.number, sequence.cache, [0], True) for sequence in closing]
        if not inputs:
            return
        results = self._graph.step(inputs, self._parts.pb_utils)
        for request, step_input, logits in zip(active, inputs, results, strict=False):
            sequence = request.sequence
            sequence.ended = step_input.ends
            try:
                if isinstance(logits, Exception):
                    raise logits
                sequence.generation.push(sequence.sampler.choose(logits))
            except Exception as error:
                self._fail(request, error)
                continue
            request.remaining -= 1
            if sequence.generation.done:
                self._closing.append(sequence)

    def _fail(self, request: PendingRequest, error: Exception) -> None:
        """End one sequence with an error; the others of the step are not affected."""
        request.remaining, request.failed = 0, True
        self._end(request.raw.correlation_id())
        Responder(request.raw, self._parts).fail(error)

    def _answer(self, request: PendingRequest) -> None:
        if request.failed:
            return
        if request.raw.flags() & END:
            self._end(request.raw.correlation_id())
        self._send(request.raw, self._piece_of(request.sequence))

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

    def _end(self, key: Any) -> None:
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
