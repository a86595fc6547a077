"""The engine: what drivers ask for, and what one step does to every sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch

from llmserve.runtime import Generation, RequestError, Tokenizer
from llmserve_iterative.engine.pages import PagePool
from llmserve_iterative.engine.runner import make_runner
from llmserve_iterative.engine.scheduler import Chunk, Scheduler, Sequence

Token = tuple[Sequence, int, "npt.NDArray[Any] | None"]
"""A sequence's next token, with the logits if the sequence wants to know them."""


@dataclass
class Progress:
    """Whose request failed in a step, on its own."""

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
    ) -> None:
        config = model.config.get_text_config()
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        self.tokens_computed = 0
        self._tokenizer = tokenizer
        self._runner = make_runner(model, cache_tokens)
        self._pool = PagePool(self._runner.page_count, self._runner.page_size)
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
    def cache_tokens(self) -> int:
        return self._pool.count * self._pool.page_size

    @property
    def cache_used(self) -> int:
        return (self._pool.count - self._pool.available) * self._pool.page_size

    def admit(self, generation: Generation) -> None:
        """Take a generation: it runs as soon as there is room. What can never run is refused."""
        prompt, answer = len(generation.prompt_ids), generation.max_tokens
        # The last token is told and never computed.
        needed = prompt + answer - 1
        if not prompt:
            raise RequestError("the prompt has no tokens: send at least one")
        if self.context_length is not None and needed > self.context_length:
            raise RequestError(
                f"the prompt's {prompt} tokens and max_tokens {answer} are over the "
                f"model's context of {self.context_length}: shorten the prompt or ask for fewer"
            )
        if needed > self.cache_tokens:
            raise RequestError(
                f"the prompt's {prompt} tokens and max_tokens {answer} are over the "
                f"cache of {self.cache_tokens} tokens: ask for fewer, or serve with more cache"
            )
        self._scheduler.waiting.append(Sequence(generation, self._tokenizer))

    def drop(self, generation: Generation) -> None:
        """Forget a generation, wherever it is; its pages are free at once."""
        if sequence := self._scheduler.find(generation):
            self._scheduler.remove(sequence)

    def step(self) -> Progress:
        """Compute a token for every live sequence and, beside it, a piece of new prompts.

        What fails for one request is told in the progress. An exception means that the pass
        itself failed; nothing was told to anybody, and the step may be tried again.
        """
        progress = Progress()
        chunks = self._scheduler.plan()
        if not chunks:
            return progress
        logits = self._runner.run(chunks)
        self.tokens_computed += sum(chunk.stop - chunk.start for chunk in chunks)
        for chunk in chunks:
            self._scheduler.computed(chunk)
        for sequence, token, row in self._choose(chunks, logits, progress):
            generation = sequence.generation
            try:
                generation.push(token, row)
            except Exception as error:
                progress.failed.append((generation, error))
                continue
            if generation.done:
                self._scheduler.remove(sequence)
        for generation, _ in progress.failed:
            self.drop(generation)
        return progress

    def _choose(
        self, chunks: list[Chunk], logits: torch.Tensor, progress: Progress
    ) -> Iterator[Token]:
        """Yield the next token of each sequence that is computed to its end."""
        # Those who want no more than the likeliest token cost one look at the device together.
        likeliest = _argmax(logits)
        for row, chunk in enumerate(chunks):
            if not chunk.complete:
                continue
            sequence, generation = chunk.sequence, chunk.sequence.generation
            if sequence.sampler is None and not generation.wants_logits:
                yield sequence, likeliest[row], None
                continue
            own = logits[row].float().cpu().numpy()
            token = likeliest[row]
            if sequence.sampler is not None:
                try:
                    token = sequence.sampler.choose(own)
                except Exception as error:
                    progress.failed.append((generation, error))
                    continue
            yield sequence, token, own if generation.wants_logits else None


def _argmax(logits: torch.Tensor) -> list[int]:
    if logits.device.type == "cpu":
        # Several times quicker than PyTorch's.
        return [int(token) for token in logits.float().numpy().argmax(axis=-1)]
    return [int(token) for token in logits.argmax(dim=-1).tolist()]
