"""The engine: the methods that drivers call, and what one step does for every sequence.

The scheduler decides what each step computes, a runner computes it, and the page pool keeps track
of the pages of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.engine.pages import PagePool
from llmserve.runtime.engine.runner import Chunk, Logits, Runner
from llmserve.runtime.engine.scheduler import ScheduledSequence, Scheduler
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
    ) -> None:
        self.tokens_computed = 0
        self._tokenizer = tokenizer
        self._runner = runner
        self._pool = PagePool(runner.page_count, runner.page_size)
        self.cache_tokens = self._pool.count * self._pool.page_size
        self._scheduler = Scheduler(
            self._pool,
            max_sequences=max_sequences,
            prefill_chunk=prefill_chunk,
            share_prefixes=share_prefixes,
        )

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
        self._scheduler.waiting.append(ScheduledSequence(generation, self._tokenizer))

    def drop(self, generation: Generation) -> None:
        """Remove a generation, running or waiting; its pages are free at once."""
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            if sequence.generation is generation:
                self._scheduler.remove(sequence)
                return

    def step(self) -> Progress:
        """Compute a token for every running sequence, and in the same pass a piece of new prompts.

        The progress reports failures of single requests. An exception means that the pass itself
        failed; no generation got a token, and the step may be tried again.
        """
        progress = Progress()
        plan = self._scheduler.plan()
        if not plan:
            return progress
        logits = self._runner.run([chunk for _, chunk in plan])
        for sequence, chunk in plan:
            self.tokens_computed += len(chunk.ids)
            self._scheduler.mark_computed(sequence, chunk.stop)
        # All sequences that need only the likeliest token share one wait for the device.
        plain = any(chunk.rows and sequence.sampler is None for sequence, chunk in plan)
        likeliest = logits.likeliest() if plain else ()
        row = 0
        for sequence, chunk in plan:
            row += chunk.rows
            if sequence.generation.wants_prompt_logits:
                _push_prompt(sequence, chunk, logits, row - chunk.rows)
            if chunk.stop == sequence.length:
                try:
                    self._push(sequence, logits, row - 1, likeliest)
                except Exception as error:
                    progress.failed.append((sequence.generation, error))
                    self._scheduler.remove(sequence)
        return progress

    def _push(
        self, sequence: ScheduledSequence, logits: Logits, index: int, likeliest: Sequence[int]
    ) -> None:
        """Choose a sequence's next token; remove the sequence if it is done."""
        generation, sampler = sequence.generation, sequence.sampler
        row = logits.row(index) if sampler or generation.wants_logits else None
        if sampler is None or row is None:
            generation.push(likeliest[index], row)
        else:
            generation.push(sampler.choose(row), row)
            if self._runner.accepts_runs and not generation.wants_logits:
                # Tokens that a constraint forces are computed together in the next pass.
                for forced in sampler.forced():
                    generation.push(forced)
        if generation.done:
            self._scheduler.remove(sequence)


def _push_prompt(sequence: ScheduledSequence, chunk: Chunk, logits: Logits, row: int) -> None:
    """Push the logits of a prompt's tokens, but none again of a sequence that lost its pages."""
    generation = sequence.generation
    for position in range(chunk.start, chunk.stop):
        if generation.wants_prompt_logits and position + 1 == len(generation.prompt_logprobs):
            generation.push_prompt(logits.row(row + position - chunk.start))
