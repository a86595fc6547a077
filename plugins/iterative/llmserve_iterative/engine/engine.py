"""The engine: the methods that drivers call, and what one step does for every sequence.

The scheduler decides what each step computes, a runner computes it, and the page pool keeps track
of the pages of the cache of keys and values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from llmserve.runtime import Generation, Progress, RequestError, Tokenizer
from llmserve_iterative.engine.pages import PagePool
from llmserve_iterative.engine.runner import make_runner
from llmserve_iterative.engine.scheduler import Scheduler, Sequence


class Engine:
    """Decodes many generations at once, token by token, with a bounded cache.

    The model is prepared for speed in place, so it belongs to the engine from now on.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        max_sequences: int,
        cache_tokens: int,
        prefill_chunk: int = 256,
    ) -> None:
        self.tokens_computed = 0
        self._tokenizer = tokenizer
        self._runner = make_runner(model, cache_tokens)
        self._pool = PagePool(self._runner.page_count, self._runner.page_size)
        self.cache_tokens = self._pool.count * self._pool.page_size
        self._scheduler = Scheduler(
            self._pool, max_sequences=max_sequences, prefill_chunk=prefill_chunk
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
                f"{self.cache_tokens} tokens: request fewer, or build with more cache_tokens",
                code="context_length_exceeded",
                param="max_tokens",
                context=self.cache_tokens,
                prompt_tokens=prompt,
                max_tokens=answer,
            )
        self._scheduler.waiting.append(Sequence(generation, self._tokenizer))

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
        chunks = self._scheduler.plan()
        if not chunks:
            return progress
        logits = self._runner.run(chunks)
        for chunk in chunks:
            self.tokens_computed += chunk.stop - chunk.start
            self._scheduler.mark_computed(chunk)
        if logits.device.type == "cpu":
            # Several times faster than PyTorch's.
            likeliest = logits.float().numpy().argmax(axis=-1).tolist()
        else:
            # All sequences that need only the likeliest token share one wait for the device.
            likeliest = logits.argmax(dim=-1).tolist()
        for chunk, row, token in zip(chunks, logits, likeliest, strict=True):
            generation = chunk.sequence.generation
            # A sequence that lost its pages recomputes positions whose logprobs it already has.
            if generation.wants_prompt_logits and chunk.stop == len(generation.prompt_logprobs):
                generation.push_prompt(row.float().cpu().numpy())
            if chunk.complete:
                self._push(chunk.sequence, row, token, progress)
        return progress

    def _push(self, sequence: Sequence, logits: Tensor, token: int, progress: Progress) -> None:
        """Choose a sequence's next token; remove the sequence if that fails or it is done."""
        generation, sampler = sequence.generation, sequence.sampler
        row = logits.float().cpu().numpy() if sampler or generation.wants_logits else None
        try:
            if sampler and row is not None:
                token = sampler.choose(row)
            generation.push(token, row)
            if sampler and self._runner.accepts_runs and not generation.wants_logits:
                # Tokens that a constraint forces are computed together in the next pass.
                for forced in sampler.forced():
                    generation.push(forced)
        except Exception as error:
            progress.failed.append((generation, error))
            self.drop(generation)
        else:
            if generation.done:
                self._scheduler.remove(sequence)
