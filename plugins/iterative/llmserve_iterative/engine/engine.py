"""The engine: who runs, who waits, and one step of all of them at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Tokenizer
from llmserve_iterative.engine.choosing import Choice, choose
from llmserve_iterative.engine.room import Room
from llmserve_iterative.engine.runner import make_runner
from llmserve_iterative.engine.sequence import Sequence, room
from llmserve_iterative.engine.span import Span


@dataclass
class Progress:
    """What one step brought: who is done, and whose request failed on its own."""

    finished: list[Generation] = field(default_factory=list)
    failed: list[tuple[Generation, Exception]] = field(default_factory=list)


class Engine:
    """Decodes many generations at once, token by token, with a bounded cache.

    The model is prepared for speed in place, so it belongs to the engine from now on.

    >>> engine = Engine(model, tokenizer, max_sequences=8, cache_tokens=8192)  # doctest: +SKIP
    >>> engine.admit(generation)  # doctest: +SKIP
    >>> while engine.busy:  # doctest: +SKIP
    ...     engine.step()
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        max_sequences: int,
        cache_tokens: int,
        prefill_chunk: int = 256,
        max_waiting: int | None = None,
    ) -> None:
        self.max_sequences = max_sequences
        self.max_waiting = max_waiting
        self.prefill_chunk = max(1, prefill_chunk)
        config = model.config.get_text_config()
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        self.tokens_computed = 0
        self._tokenizer = tokenizer
        self._runner = make_runner(model, cache_tokens)
        self._room = Room(cache_tokens, self._runner.copy)
        self._waiting: deque[Generation] = deque()
        self._live: list[Sequence] = []

    @property
    def way(self) -> str:
        """How the model runs: ``"flat"`` is fast, ``"padded"`` suits any model."""
        return self._runner.way

    @property
    def live(self) -> int:
        """How many sequences are under way."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """How many generations wait for room."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live or self._waiting)

    @property
    def cache_tokens(self) -> int:
        """How many tokens the cache has room for."""
        return self._room.size

    @property
    def cache_used(self) -> int:
        """How many tokens' room the live sequences hold."""
        return self._room.used

    @property
    def cache_kept(self) -> int:
        """How many tokens' room finished sequences hold until somebody needs it."""
        return self._room.kept

    def admit(self, generation: Generation) -> None:
        """Take a generation: it runs as soon as there is room. What can never run is refused."""
        needed, prompt = room(generation), len(generation.prompt_ids)
        if not prompt:
            raise RequestError("the prompt has no tokens: send at least one")
        if self.context_length is not None and needed >= self.context_length + 1:
            raise RequestError(
                f"the prompt's {prompt} tokens and max_tokens {generation.max_tokens} are over the "
                f"model's context of {self.context_length}: shorten the prompt or ask for fewer"
            )
        if not self._room.could_hold(needed):
            raise RequestError(
                f"the prompt's {prompt} tokens and max_tokens {generation.max_tokens} are over the "
                f"cache of {self.cache_tokens} tokens: ask for fewer, or serve with more cache"
            )
        if self.max_waiting is not None and len(self._waiting) >= self.max_waiting:
            raise RequestError(f"{self.max_waiting} requests are waiting already: try again later")
        self._waiting.append(generation)

    def drop(self, generation: Generation) -> None:
        """Forget a generation, wherever it is; its room is free at once."""
        if generation in self._waiting:
            self._waiting.remove(generation)
        for sequence in self._live:
            if sequence.generation is generation:
                self._live.remove(sequence)
                self._room.free(sequence)
                return

    def step(self) -> Progress:
        """Compute a token for every live sequence and, beside it, a piece of new prompts.

        What fails for one request is told in the progress. An exception means that the pass
        itself failed; nothing was told to anybody, and the step may be tried again.
        """
        progress = Progress()
        self._seat(progress)
        spans = self._spans()
        if not spans:
            return progress
        logits = self._runner.run(spans)
        self.tokens_computed += sum(len(span.ids) for span in spans)
        for span in spans:
            span.sequence.computed = span.stop
        whole = [index for index, span in enumerate(spans) if span.complete]
        sequences = [spans[index].sequence for index in whole]
        for choice in choose(sequences, logits, whole, progress.failed):
            self._push(choice, progress)
        for generation, _ in progress.failed:
            self.drop(generation)
        return progress

    def _seat(self, progress: Progress) -> None:
        """Give room to those who wait, in the order in which they came."""
        while self._waiting and len(self._live) < self.max_sequences:
            generation = self._waiting[0]
            extent = self._room.take(generation)
            if extent is None:
                return
            self._waiting.popleft()
            try:
                sequence = Sequence(generation, self._tokenizer, extent)
            except Exception as error:
                self._room.give_back(extent)
                progress.failed.append((generation, error))
                continue
            self._room.furnish(sequence, self._live)
            self._live.append(sequence)

    def _spans(self) -> list[Span]:
        """Return what this step computes: the newest token of each, and prompts up to a limit."""
        spans = [Span(s, s.computed, s.length) for s in self._live if not s.prefilling]
        budget = self.prefill_chunk
        for sequence in self._live:
            if sequence.prefilling and budget:
                stop = min(sequence.length, sequence.computed + budget)
                spans.append(Span(sequence, sequence.computed, stop))
                budget -= stop - sequence.computed
        return spans

    def _push(self, choice: Choice, progress: Progress) -> None:
        sequence, token, logits = choice
        generation = sequence.generation
        try:
            generation.push(token, logits)
        except Exception as error:
            progress.failed.append((generation, error))
            return
        if generation.done:
            self._live.remove(sequence)
            self._room.retire(sequence)
            progress.finished.append(generation)
