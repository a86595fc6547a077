"""vLLM's engine as a stepper: requests in, tokens out, and a new engine after a failed step."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmserve.runtime import Adapters, Generation, Progress, RequestError, Tokenizer
from llmserve.runtime.contract import CLASSES, LATE_AFTER, LATE_EVERY
from llmserve_vllm import library
from llmserve_vllm.load import Model
from llmserve_vllm.translate import (
    check_constraint,
    first_line,
    is_repeatable,
    logprobs_of,
    sampling_params,
)

# How long a step without an answer takes at least: no sequence can run while vLLM compiles what a
# form allows. One that has computed a part of a long prompt has taken longer.
_PAUSE = 0.001
_FIRST = CLASSES[0] - 1
"""A class above all that requests may have."""
_NATURAL_ENDS = ("stop", "length", "repetition")


@dataclass
class _Running:
    generation: Generation
    known: int
    """How many of the next tokens it has already, from before it came back."""
    adapter: str
    """The key of the adapter that it holds, if it has one."""
    number: int
    """Its class."""
    since: float
    """When it got its last token, or was passed on."""


class VllmStepper:
    """Decodes generations with vLLM, which schedules them and chooses their tokens."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        adapters: Adapters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._model = model
        self._tokenizer = tokenizer
        self._adapters = adapters
        self._held_back: deque[tuple[Generation, str]] = deque()
        """Those that wait for memory for their adapters, with the keys of these."""
        self._names = itertools.count()
        self._running: dict[str, _Running] = {}

    @property
    def busy(self) -> bool:
        return bool(self._running or self._held_back)

    @property
    def live(self) -> int:
        return len(self._running) + len(self._held_back) - self.waiting

    @property
    def waiting(self) -> int:
        return min(self._model.usage.waiting, len(self._running)) + len(self._held_back)

    @property
    def cache_used(self) -> int:
        return round(self._model.usage.cache_share * self.cache_tokens) if self._running else 0

    @property
    def cache_tokens(self) -> int:
        return self._model.cache_tokens

    @property
    def guessed_tokens(self) -> int:
        return self._model.usage.guessed

    @property
    def accepted_tokens(self) -> int:
        return self._model.usage.accepted

    def admit(self, generation: Generation) -> None:
        """Pass a generation to vLLM; one that was dropped continues after its last token.

        One waits here while there is no memory for its adapter.
        """
        check_constraint(generation)
        name = generation.params.adapter
        key = self._adapters.find(name) if name else ""
        if key and (self._held_back or not self._adapters.hold(name or "", key)):
            self._held_back.append((generation, key))
        else:
            self._pass_on(generation, key)

    def _pass_on(self, generation: Generation, key: str) -> None:
        try:
            self._add(generation, key)
        except BaseException:
            if key:
                self._adapters.release(key)
            raise

    def _add(self, generation: Generation, key: str, number: int | None = None) -> None:
        # One with a seed or a form begins again, with the same tokens. Any other goes on from
        # those that it has, as if they were the prompt's.
        known = len(generation.token_ids) if is_repeatable(generation.params) else 0
        answered = len(generation.token_ids) - known
        params = sampling_params(
            generation, self._tokenizer, vocabulary=self._model.vocabulary, answered=answered
        )
        ids = generation.prompt_ids + generation.token_ids[:answered]
        seen = generation.images
        prompt = library.tokens_input(ids) if seen is None else {**seen, "prompt_token_ids": ids}
        name = str(next(self._names))
        if number is None:
            number = generation.params.priority_class
        classes = {"priority": number} if self._model.has_classes else {}
        try:
            self._model.engine.add_request(
                name,
                prompt,
                params,
                lora_request=self._model.adapters.request(key) if key else None,
                **classes,
            )
        except ValueError as error:
            raise RequestError(f"vLLM refuses the request: {first_line(error)}") from None
        # From here on, vLLM enforces it.
        generation.constraint = None
        self._running[name] = _Running(generation, known, key, number, self._clock())

    def step(self) -> Progress:
        """Run a step of vLLM's engine, and push what it has chosen.

        If the step fails, the engine is discarded with all that it held; the next request gets a
        new one.
        """
        started = time.perf_counter()
        progress = Progress()
        self._admit_held_back(progress)
        try:
            outputs = self._model.engine.step()
        except Exception:
            for name in [*self._running]:
                self._forget(name)
            self._held_back.clear()
            self._model.discard()
            raise
        now = self._clock()
        for output in outputs:
            # One that was dropped may still get a last token.
            if running := self._running.get(output.request_id):
                if output.finished:
                    self._forget(output.request_id)
                running.since = now
                try:
                    _push(running, output)
                except Exception as error:
                    progress.failed.append((running.generation, error))
                    self.drop(running.generation)
                if running.generation.done:
                    self.drop(running.generation)
        if self._model.has_classes:
            self._raise_late(now, progress)
        if not outputs:
            time.sleep(max(0.0, _PAUSE - (time.perf_counter() - started)))
        return progress

    def drop(self, generation: Generation) -> None:
        """Abort a generation in vLLM, if it runs there."""
        names = [n for n, running in self._running.items() if running.generation is generation]
        for name in names:
            self._forget(name)
            self._model.engine.abort_request([name])
        waiting = (each for each in self._held_back if each[0] is not generation)
        self._held_back = deque(waiting)

    def _admit_held_back(self, progress: Progress) -> None:
        """Pass on those whose adapters find memory now, in the order of their arrival."""
        while self._held_back:
            generation, key = self._held_back.popleft()
            try:
                if not self._adapters.hold(generation.params.adapter or "", key):
                    self._held_back.appendleft((generation, key))
                    return
                self._pass_on(generation, key)
            except RequestError as error:
                progress.failed.append((generation, error))

    def _raise_late(self, now: float, progress: Progress) -> None:
        """Have one go before all others that has got nothing for too long for those above it.

        It is passed on again, in a class of its own, as long as no more than one in
        :data:`LATE_EVERY` is there.
        """
        running = self._running.values()
        above = min((each.number for each in running if each.number != _FIRST), default=_FIRST)
        late = {
            name: each.since
            for name, each in self._running.items()
            if each.number > above and now - each.since >= LATE_AFTER
        }
        first = sum(each.number == _FIRST for each in running)
        if not late or first >= max(1, len(running) // LATE_EVERY):
            return
        name = min(late, key=lambda name: late[name])
        raised = self._running.pop(name)
        self._model.engine.abort_request([name])
        try:
            self._add(raised.generation, raised.adapter, _FIRST)
        except RequestError as error:
            if raised.adapter:
                self._adapters.release(raised.adapter)
            progress.failed.append((raised.generation, error))

    def _forget(self, name: str) -> None:
        running = self._running.pop(name)
        if running.adapter:
            self._adapters.release(running.adapter)


def _push(running: _Running, output: Any) -> None:
    """Give a generation what vLLM has chosen for it, and end it if vLLM did."""
    generation, (answer,) = running.generation, output.outputs
    params = generation.params
    if generation.cached_tokens is None:
        generation.cached_tokens = output.num_cached_tokens
    for position in output.prompt_logprobs or ():
        if position and generation.wants_prompt_logits:
            token = generation.prompt_ids[len(generation.prompt_logprobs)]
            found = logprobs_of(position, token, params.prompt_logprobs or 0)
            generation.push_prompt(logprob=found)
    logprobs = answer.logprobs or [None] * len(answer.token_ids)
    for token, position in zip(answer.token_ids, logprobs, strict=True):
        if running.known:
            running.known -= 1
        elif position is None:
            generation.push(token)
        else:
            count = params.logprobs_count or 0
            found = logprobs_of(position, token, count, generation.scored)
            generation.push(token, logprob=found)
    if output.finished and not generation.done:
        if answer.finish_reason not in _NATURAL_ENDS:
            raise RuntimeError(f"vLLM ended the request: {answer.finish_reason}")
        generation.end()
