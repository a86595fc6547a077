"""One generation inside the engine: its place in the cache and how far it is computed."""

from __future__ import annotations

from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Tokenizer
from llmserve.runtime.sampling import Sampler
from llmserve_iterative.engine.arena import Extent


class Sequence:
    """A generation with room in the cache. ``computed`` tokens of it are there already."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer, extent: Extent) -> None:
        self.generation = generation
        self.extent = extent
        self.computed = 0
        self.sampler = None if generation.plain else Sampler(generation, tokenizer)

    @property
    def length(self) -> int:
        """How many tokens are known: the prompt and what was chosen since."""
        return len(self.generation.prompt_ids) + len(self.generation.token_ids)

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is still to be computed."""
        return self.computed < len(self.generation.prompt_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return a stretch of the known tokens."""
        prompt, answer = self.generation.prompt_ids, self.generation.token_ids
        border = len(prompt)
        if start >= border:
            return answer[start - border : stop - border]
        return prompt[start:stop] + answer[: max(0, stop - border)]


def room(generation: Generation) -> int:
    """Return how many tokens of a generation the cache may have to hold.

    The last token is told and never computed, so it needs no room.
    """
    return len(generation.prompt_ids) + generation.max_tokens - 1
