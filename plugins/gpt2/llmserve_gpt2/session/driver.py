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

from llmserve.runtime.errors import RequestError
from llmserve.runtime.protocols import Parts
from llmserve.runtime.stage import failure, tensors_of
from llmserve_gpt2.session.graph import END, START, Graph, Turn
from llmserve_gpt2.session.opening import Wishes, opened
from llmserve_gpt2.session.sequences import Sequence as Told
from llmserve_gpt2.session.sequences import Sequences

# Of a batch's time, what may be spent on bringing sequences together.
_SMALL_PART = 0.05


@dataclass
class Asked:
    """A request under way, and how many tokens it still gets."""

    raw: Any
    told: Told
    left: int
    failed: bool = False

    @property
    def going(self) -> bool:
        """Whether it needs another step."""
        return self.left > 0 and not self.told.generation.done

    @property
    def last(self) -> bool:
        """Whether the sequence surely ends with the next token."""
        generation = self.told.generation
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
        self._closing: list[Told] = []

    def start(self, parts: Parts) -> None:
        """Take the model's other parts."""
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
        self._wait_for_the_others([one.told for one in asked], now)

    def finalize(self) -> None:
        """Let go of everything; the generator may be gone already."""
        self._sequences.clear()
        self._graph.close()

    def _wait_for_the_others(self, answered: Sequence[Told], began: float) -> None:
        """Let who was just answered ask again before those begin who waited meanwhile.

        Else two groups of sequences would take turns for ever: whoever misses a batch comes while
        the next is under way, and each then runs with half of the rows.
        """
        ended = time.monotonic()
        took = ended - began
        for told in answered:
            told.seen = ended
        if self._sequences.apart(answered, since=began - took):
            self._pause(min(self._wait, _SMALL_PART * took))

    def _arrive(self, raw: Any, now: float) -> Asked | None:
        """Match a request with its sequence; who needs no step is answered at once."""
        tensors = tensors_of(raw)
        if not tensors["READY"].any():
            # It only fills a slot whose sequence has no request now; Triton wants an answer.
            self._send(raw, self._told(None))
            return None
        key, flags = raw.correlation_id(), raw.flags()
        try:
            wishes = Wishes.read(tensors)
            if flags & START:
                told = opened(wishes, self._parts, self._graph.sequence(), now)
                self._closing += self._sequences.start(key, told)
            elif flags & END and wishes.step == 0:
                self._forget(key)
                self._send(raw, self._told(None))
                return None
            else:
                told = self._sequences.step(key, now)
                told = self._continued(key, told, wishes, now)
        except RequestError as error:
            # A step that asks for nonsense leaves its sequence as it was.
            if flags & (START | END):
                self._forget(key)
            pb = self._parts.pb_utils
            self._refuse(raw, pb.TritonError(str(error), pb.TritonError.INVALID_ARG))
            return None
        except Exception as error:
            self._forget(key)
            self._refuse(raw, failure(error, self._parts))
            return None
        step = 1 if wishes.step is None else wishes.step
        one = Asked(raw, told, min(step, self._most_tokens))
        if not one.going:
            self._answer(one)
        return one

    def _continued(self, key: Any, told: Told, wishes: Wishes, now: float) -> Told:
        """Go on with a sequence, or begin anew where the text that is resent has changed."""
        if not self._resent:
            wishes.refuse_as_step(told.generation.params)
            return told
        if wishes.prompt == told.generation.prompt + told.generation.text:
            return told
        anew = opened(wishes, self._parts, self._graph.sequence(), now)
        self._closing += self._sequences.start(key, anew)
        return anew

    def _step(self, going: Sequence[Asked]) -> None:
        """Make a token for everyone, and tell the generator who is gone."""
        gone = [told for told in self._closing if told.open]
        self._closing.clear()
        turns = [Turn(one.told.number, one.told.lane, one.told.feed(), one.last) for one in going]
        turns += [Turn(told.number, told.lane, [0], True) for told in gone]
        if not turns:
            return
        answers = self._graph.step(turns, self._parts.pb_utils)
        for one, turn, logits in zip(going, turns, answers, strict=False):
            one.told.ended = turn.ends
            try:
                if isinstance(logits, Exception):
                    raise logits
                one.told.generation.push(one.told.sampler.choose(logits))
            except Exception as error:
                self._fail(one, error)
                continue
            one.left -= 1
            if one.told.generation.done:
                self._closing.append(one.told)

    def _fail(self, one: Asked, error: Exception) -> None:
        """Give up one sequence; the others of the step know nothing of it."""
        one.left, one.failed = 0, True
        self._forget(one.raw.correlation_id())
        self._refuse(one.raw, failure(error, self._parts))

    def _answer(self, one: Asked) -> None:
        if one.failed:
            return
        if one.raw.flags() & END:
            self._forget(one.raw.correlation_id())
        self._send(one.raw, self._told(one.told))

    def _told(self, told: Told | None) -> dict[str, Any]:
        if told is None:
            return {"piece": "", "so_far": "", "echo": "", "reason": "", "counts": [0, 0]}
        generation = told.generation
        echo = generation.prompt if told.echo and generation.untold else ""
        return {
            "piece": generation.take(),
            "so_far": generation.text,
            "echo": echo,
            "reason": generation.finish_reason or "",
            "counts": [len(generation.prompt_ids), len(generation.token_ids)],
        }

    def _forget(self, key: Any) -> None:
        if (told := self._sequences.end(key)) is not None:
            self._closing.append(told)

    def _send(self, raw: Any, values: Mapping[str, Any]) -> None:
        pb = self._parts.pb_utils
        tensors = [
            pb.Tensor(name, np.array([value], np.int32))
            if isinstance(value, list)
            else pb.Tensor(name, np.array([[value.encode()]], np.object_))
            for name, value in values.items()
        ]
        response = pb.InferenceResponse(output_tensors=tensors)
        raw.get_response_sender().send(response, flags=self._final)

    def _refuse(self, raw: Any, error: Any) -> None:
        response = self._parts.pb_utils.InferenceResponse(output_tensors=[], error=error)
        raw.get_response_sender().send(response, flags=self._final)

    @property
    def _final(self) -> Any:
        return self._parts.pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
