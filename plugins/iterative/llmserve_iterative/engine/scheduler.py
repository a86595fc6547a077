"""Who runs, who waits, and what each step computes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from llmserve.runtime import Generation, Params, Sampler, Tokenizer
from llmserve_iterative.engine.pages import START, PagePool


class Sequence:
    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self.sampler = None if generation.plain else Sampler(generation, tokenizer)
        self.lose_pages()

    def lose_pages(self) -> None:
        self.pages: list[int] = []
        self.computed = 0
        self.published = 0
        self.last_content = START

    @property
    def length(self) -> int:
        """How many tokens are known: the prompt and what was chosen since."""
        return len(self.generation.prompt_ids) + len(self.generation.token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        prompt, answer = self.generation.prompt_ids, self.generation.token_ids
        border = len(prompt)
        if start >= border:
            return answer[start - border : stop - border]
        return prompt[start:stop] + answer[: max(0, stop - border)]


def detached_sequence(ids: list[int], pages: list[int]) -> Sequence:
    silent = Generation(ids, Params(), max_tokens=1, eos_ids=frozenset(), decode=lambda _: "")
    sequence = Sequence(silent, None)  # type: ignore[arg-type]
    sequence.pages = pages
    return sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``stop`` of a sequence; everything before them is in the cache."""

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
        """Whether it ends with the newest token, so that the next one can be chosen."""
        return self.stop == self.sequence.length


class Scheduler:
    """First come, first served, as long as there are places and pages.

    Sequences take pages as they grow. When none is left, the one that came last goes back to the
    front of the queue, and what was computed of it is computed again later.
    """

    def __init__(self, pool: PagePool, *, max_sequences: int, prefill_chunk: int) -> None:
        self.pool = pool
        self.max_sequences = max_sequences
        self.prefill_chunk = max(1, prefill_chunk)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order in which they came."""

    def plan(self) -> list[Chunk]:
        """Return the newest token of every running sequence, and behind them pieces of those that
        have several: new prompts, and what a form added a run of tokens to."""
        self._admit()
        chunks = []
        budget = self.prefill_chunk
        # Growing puts back only those at the end, which are not planned yet.
        for sequence in self.running:
            start = sequence.computed
            single = sequence.length - start == 1
            if not (single or budget) or not self._grow(sequence):
                continue
            # A pass gives the logits of a chunk's last token, and some want those of every one.
            most = 1 if single or sequence.generation.wants_prompt_logits else budget
            chunks.append(Chunk(sequence, start, min(sequence.length, start + most)))
            if not single:
                budget -= chunks[-1].stop - start
        return sorted(chunks, key=lambda chunk: not chunk.single)

    def computed(self, chunk: Chunk) -> None:
        """Take note that a chunk is in the cache, and let others share its full pages."""
        sequence, size = chunk.sequence, self.pool.page_size
        sequence.computed = chunk.stop
        while (start := sequence.published * size) + size <= sequence.computed:
            ids = tuple(sequence.tokens(start, start + size))
            page = sequence.pages[sequence.published]
            sequence.last_content = self.pool.publish(page, sequence.last_content, ids)
            sequence.published += 1

    def remove(self, sequence: Sequence) -> None:
        """Forget one that runs or waits; its pages are free at once."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            # The last token is computed in any case: the next one is chosen from its logits.
            known = sequence.tokens(0, sequence.length - 1)
            if sequence.generation.wants_prompt_logits:
                known = []  # What others have computed has no logits any more.
            pages, content = self.pool.share(known)
            missing = self.pool.pages_for(sequence.length) - len(pages)
            # With a page to grow for each of the others, it is not put back at once.
            if missing + len(self.running) > self.pool.available:
                self.pool.release(pages)
                return
            self.running.append(self.waiting.popleft())
            sequence.pages, sequence.published = pages, len(pages)
            sequence.last_content = content
            sequence.computed = len(pages) * self.pool.page_size
            self._grow(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        """Give a sequence pages for all its tokens; whoever came last may lose theirs for it.

        Returns whether the sequence still runs: it may have been the last itself.
        """
        while len(sequence.pages) < self.pool.pages_for(sequence.length):
            if (page := self.pool.take(*sequence.pages[-1:])) is not None:
                sequence.pages.append(page)
                continue
            last = self.running.pop()
            self._release(last)
            self.waiting.appendleft(last)
            if last is sequence:
                return False
        return True

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.lose_pages()
