"""Decides which sequences run, which wait, and what each step computes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from llmserve.runtime import Generation, Params, Sampler, Tokenizer
from llmserve_iterative.engine.pages import START, PagePool


class Sequence:
    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self.sampler = None if generation.plain else Sampler(generation, tokenizer)
        self.reset_pages()

    def reset_pages(self) -> None:
        self.pages: list[int] = []
        self.computed = 0
        self.published = 0
        self.last_content = START

    @property
    def length(self) -> int:
        """The number of tokens in the prompt and the answer so far."""
        return len(self.generation.prompt_ids) + len(self.generation.token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        prompt, answer = self.generation.prompt_ids, self.generation.token_ids
        length = len(prompt)
        if start >= length:
            return answer[start - length : stop - length]
        return prompt[start:stop] + answer[: max(0, stop - length)]


def detached_sequence(ids: list[int], pages: list[int]) -> Sequence:
    generation = Generation(ids, Params(), max_tokens=1, eos_ids=frozenset(), decode=lambda _: "")
    sequence = Sequence(generation, None)  # type: ignore[arg-type]
    sequence.pages = pages
    return sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``stop`` of a sequence; all tokens before them are in the cache."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def pages(self) -> list[int]:
        return self.sequence.pages

    @property
    def single(self) -> bool:
        return self.stop - self.start == 1

    @property
    def complete(self) -> bool:
        """Whether the chunk ends with the newest token, so that the next one can be chosen."""
        return self.stop == self.sequence.length


class Scheduler:
    """Runs sequences in order of arrival, as long as there are slots and pages.

    Sequences take pages as they grow. When none is left, the newest running sequence returns to
    the front of the queue, and its tokens are recomputed later.
    """

    def __init__(self, pool: PagePool, *, max_sequences: int, prefill_chunk: int) -> None:
        self.pool = pool
        self.max_sequences = max_sequences
        self.prefill_chunk = max(1, prefill_chunk)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of arrival."""

    def plan(self) -> list[Chunk]:
        """Return the newest token of every running sequence, followed by pieces of sequences with
        several uncomputed tokens: new prompts, and runs of tokens that a constraint forced."""
        self._admit()
        chunks = []
        budget = self.prefill_chunk
        # Growing requeues only sequences at the end, which are not planned yet.
        for sequence in self.running:
            start = sequence.computed
            single = sequence.length - start == 1
            if not (single or budget) or not self._grow(sequence):
                continue
            # A pass returns only the logits of a chunk's last token; some requests need all.
            limit = 1 if single or sequence.generation.wants_prompt_logits else budget
            chunks.append(Chunk(sequence, start, min(sequence.length, start + limit)))
            if not single:
                budget -= chunks[-1].stop - start
        return sorted(chunks, key=lambda chunk: not chunk.single)

    def mark_computed(self, chunk: Chunk) -> None:
        """Record that a chunk is in the cache, and let other sequences share its full pages."""
        sequence, size = chunk.sequence, self.pool.page_size
        sequence.computed = chunk.stop
        while (start := sequence.published * size) + size <= sequence.computed:
            ids = tuple(sequence.tokens(start, start + size))
            page = sequence.pages[sequence.published]
            sequence.last_content = self.pool.publish(page, sequence.last_content, ids)
            sequence.published += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence; its pages are free at once."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            # The last token is always computed: the next one is chosen from its logits.
            reusable = sequence.tokens(0, sequence.length - 1)
            if sequence.generation.wants_prompt_logits:
                reusable = []  # The cache does not keep logits.
            pages, content = self.pool.share(reusable)
            missing = self.pool.pages_for(sequence.length) - len(pages)
            # A page for each of the others to grow keeps it from being requeued at once.
            if missing + len(self.running) > self.pool.available:
                self.pool.release(pages)
                return
            self.running.append(self.waiting.popleft())
            sequence.pages, sequence.published = pages, len(pages)
            sequence.last_content = content
            sequence.computed = len(pages) * self.pool.page_size
            if sequence.generation.cached_tokens is None:
                # Not again when it gets its pages back: these are of its own tokens.
                sequence.generation.cached_tokens = sequence.computed
            self._grow(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        """Give a sequence pages for all its tokens, if necessary those of the newest sequences.

        Returns whether the sequence still runs: it may have been the newest itself.
        """
        while len(sequence.pages) < self.pool.pages_for(sequence.length):
            if (page := self.pool.take(*sequence.pages[-1:])) is not None:
                sequence.pages.append(page)
                continue
            newest = self.running.pop()
            self._release(newest)
            self.waiting.appendleft(newest)
            if newest is sequence:
                return False
        return True

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.reset_pages()
