"""The engine: the methods that drivers call, and what one step does for every sequence.

The scheduler decides what each step computes, a runner computes it, and the page pool keeps track
of the pages of the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.engine.adapters import Adapters
from llmserve.runtime.engine.guessing import Guesser, Price
from llmserve.runtime.engine.pace import Pace
from llmserve.runtime.engine.pages import PagePool
from llmserve.runtime.engine.runner import Chunk, Logits, Runner, StateRunner
from llmserve.runtime.engine.scheduler import ScheduledSequence, Scheduler
from llmserve.runtime.engine.states import States
from llmserve.runtime.engine.warm import WarmPages
from llmserve.runtime.errors import RequestError
from llmserve.runtime.protocols import Progress, Tokenizer


class Engine:
    """Decodes many generations at once, token by token, with a bounded cache.

    It is the :class:`~llmserve.runtime.Stepper` of any :class:`~llmserve.runtime.Runner`. Only one
    thread at a time may use it.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        max_sequences: int,
        prefill_chunk: int = 256,
        share_prefixes: bool = True,
        guesser: Guesser | None = None,
        adapters: Adapters | None = None,
        warm: WarmPages | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds_saved = 0.0
        self.tokens_computed = self.guessed_tokens = self.accepted_tokens = 0
        self._guesser = guesser
        self._price = Price()
        self._pace = Pace(prefill_chunk)
        self._tokenizer = tokenizer
        self._runner = runner
        self._pool = PagePool(runner.page_count, runner.page_size)
        self.cache_tokens = self._pool.count * self._pool.page_size
        self._scheduler = Scheduler(
            self._pool,
            max_sequences=max_sequences,
            pace=self._pace,
            share_prefixes=share_prefixes,
            adapters=adapters,
            states=States(runner) if isinstance(runner, StateRunner) else None,
            warm=warm,
            clock=clock,
        )
        self._warm = warm
        self._adapters = adapters

    @property
    def live(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def cache_used(self) -> int:
        return self.cache_tokens - self._pool.available * self._pool.page_size

    @property
    def warm_tokens(self) -> int:
        """How many tokens were read from disk instead of computed."""
        return self._scheduler.filled_tokens

    @property
    def warm_bytes(self) -> int:
        """How many bytes these had."""
        return self._warm.bytes_read if self._warm else 0

    def close(self) -> None:
        """Write the pages that are to be kept; the engine is not used after that."""
        if self._warm is not None:
            self._warm.close()

    def admit(self, generation: Generation) -> None:
        """Queue a generation until there is space for it; refuse one that can never run."""
        prompt, answer = len(generation.prompt_ids), generation.max_tokens
        # The last token is returned and never computed.
        left = self.cache_tokens - prompt + 1
        if generation.params.max_tokens is None and left >= max(1, generation.params.min_tokens):
            # The request named no length: it gets what the cache can hold.
            answer = generation.max_tokens = min(answer, left)
        if prompt + answer - 1 > self.cache_tokens:
            raise RequestError(
                f"the prompt's {prompt} tokens and max_tokens {answer} exceed the cache of "
                f"{self.cache_tokens} tokens: request fewer, or build with a larger cache",
                code="context_length_exceeded",
                param="max_tokens",
                context=self.cache_tokens,
                prompt_tokens=prompt,
                max_tokens=answer,
            )
        key = ""
        if name := generation.params.adapter:
            if self._adapters is None:
                raise RequestError(
                    "this model has no adapters", code="adapter_not_found", param="adapter"
                )
            key = self._adapters.find(name)
        beginning = self._pool.beginning(key, generation.params.cache_salt or "")
        self._scheduler.add(ScheduledSequence(generation, self._tokenizer, key, beginning))

    def drop(self, generation: Generation) -> None:
        """Remove a generation, running or waiting; its pages are free at once."""
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            if sequence.generation is generation:
                self._remove(sequence)
                return

    def step(self) -> Progress:
        """Compute a token for every running sequence, and in the same pass a piece of new prompts.

        The progress reports failures of single requests. An exception means that the pass itself
        failed; no generation got a token, and the step may be tried again.
        """
        progress = Progress()
        began = time.perf_counter()
        guesses = self._guess() if self._guesser else {}
        guessed = time.perf_counter()
        before = self._scheduler.filled_tokens
        plan = self._scheduler.plan(guesses)
        filling = self._scheduler.filling
        if filling and (rate := self._pace.rate):
            saved = (self._scheduler.filled_tokens - before) / rate - filling
            self.seconds_saved += max(0.0, saved)
        progress.failed += self._scheduler.failed
        self._scheduler.failed.clear()
        if not plan:
            return progress
        try:
            logits = self._runner.run([chunk for _, chunk in plan])
        except Exception:
            self._scheduler.pass_failed()
            raise
        # All sequences that need only the likeliest token share one wait for the device.
        plain = any(chunk.rows and sequence.sampler is None for sequence, chunk in plan)
        likeliest = logits.likeliest() if plain else ()
        seconds = time.perf_counter() - guessed - filling
        self._pace.measured(
            sum(len(chunk.ids) for sequence, chunk in plan if not sequence.is_answering), seconds
        )
        if self._guesser and all(chunk.rows for _, chunk in plan):
            self._price.measured(
                sum(len(chunk.ids) for _, chunk in plan),
                seconds,
                guessing=guessed - began,
                depth=max(map(len, guesses.values()), default=0),
            )
        row = 0
        for sequence, chunk in plan:
            self.tokens_computed += len(chunk.ids)
            known = min(chunk.stop, sequence.length)
            self._scheduler.mark_computed(sequence, known)
            row += chunk.rows
            if sequence.generation.wants_prompt_logits:
                _push_prompt(sequence, chunk, logits, row - chunk.rows)
            if known == sequence.length:
                try:
                    self._extend(sequence, chunk, logits, likeliest, row)
                except Exception as error:
                    progress.failed.append((sequence.generation, error))
                    self._remove(sequence)
        return progress

    def _guess(self) -> Mapping[ScheduledSequence, list[int]]:
        """Guess what comes next in those sequences where that pays."""
        singles = self._scheduler.next_singles()
        if self._guesser is None or not (singles and self._runner.accepts_runs):
            return {}
        price = self._price.of_guess(len(singles))
        wanted = {}
        for sequence in singles:
            generation = sequence.generation
            depth = sequence.chance.depth(price, self._guesser.most) or int(self._price.is_trial)
            # The last token is returned and never computed.
            left = generation.max_tokens - len(generation.token_ids) - 1
            if count := min(depth, left):
                wanted[generation] = count
        found = self._guesser.guess(wanted) if wanted else {}
        return {s: ids for s in singles if (ids := found.get(s.generation))}

    def _extend(
        self,
        sequence: ScheduledSequence,
        chunk: Chunk,
        logits: Logits,
        likeliest: Sequence[int],
        stop: int,
    ) -> None:
        """Choose a sequence's next token, and those after it as long as guesses are right.

        ``stop`` is the row after the chunk's last one. A sequence that is done is removed.
        """
        generation = sequence.generation
        guesses = chunk.ids[sequence.length - chunk.start :]
        right = 0
        for row, guess in enumerate([*guesses, None], stop - 1 - len(guesses)):
            token = self._push(sequence, logits, row, likeliest)
            if token != guess or generation.done:
                break
            right += 1
        if guesses:
            sequence.chance.checked(len(guesses), right)
            self.guessed_tokens += len(guesses)
            self.accepted_tokens += right
            self._scheduler.mark_computed(sequence, sequence.computed + right)
        if generation.done:
            self._remove(sequence)
        elif sequence.sampler and self._runner.accepts_runs and not generation.wants_logits:
            # Tokens that a constraint forces are computed together in the next pass.
            for forced in sequence.sampler.forced():
                generation.push(forced)
            if generation.done:
                self._remove(sequence)

    def _push(
        self, sequence: ScheduledSequence, logits: Logits, index: int, likeliest: Sequence[int]
    ) -> int:
        """Choose a sequence's next token and return it."""
        generation, sampler = sequence.generation, sequence.sampler
        row = logits.row(index) if sampler or generation.wants_logits else None
        token = likeliest[index] if sampler is None or row is None else sampler.choose(row)
        generation.push(token, row)
        return token

    def _remove(self, sequence: ScheduledSequence) -> None:
        self._scheduler.remove(sequence)
        if self._guesser:
            self._guesser.drop(sequence.generation)


def _push_prompt(sequence: ScheduledSequence, chunk: Chunk, logits: Logits, row: int) -> None:
    """Push the logits of a prompt's tokens, but none again of a sequence that lost its pages."""
    generation = sequence.generation
    for position in range(chunk.start, chunk.stop):
        if generation.wants_prompt_logits and position + 1 == len(generation.prompt_logprobs):
            generation.push_prompt(logits.row(row + position - chunk.start))
