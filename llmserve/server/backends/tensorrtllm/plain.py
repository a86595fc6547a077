"""Decoding with nothing but transformers: a step is a token of one sequence after another."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from llmserve.runtime.generation import Generation
from llmserve.runtime.sampling import Sampler
from llmserve.server.backends.tensorrtllm.tokens import IdTokenizer


@dataclass
class Progress:
    """What a step brought, beside the tokens that were pushed."""

    failed: list[tuple[Generation, Exception]] = field(default_factory=list)


@dataclass
class _Live:
    generation: Generation
    sampler: Sampler
    past: Any = None


class PlainStepper:
    """Keeps a cache for each sequence; slow beside an engine, and right."""

    def __init__(self, model: Any, most: int) -> None:
        self._model = model
        self._most = most
        self._waiting: deque[Generation] = deque()
        self._live: list[_Live] = []

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live or self._waiting)

    @property
    def live(self) -> int:
        """How many sequences are under way."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting)

    @property
    def cache_used(self) -> int:
        """How many tokens are held."""
        return sum(
            len(one.generation.prompt_ids) + len(one.generation.token_ids) for one in self._live
        )

    @property
    def cache_tokens(self) -> int:
        """There is no bound but the machine's."""
        return 0

    def admit(self, generation: Generation) -> None:
        """Take a sequence, now or when there is room."""
        self._waiting.append(generation)

    def drop(self, generation: Generation) -> None:
        """Forget a sequence."""
        if generation in self._waiting:
            self._waiting.remove(generation)
        self._live = [one for one in self._live if one.generation is not generation]

    def step(self) -> Progress:
        """Push a token into every sequence under way."""
        while self._waiting and len(self._live) < self._most:
            generation = self._waiting.popleft()
            self._live.append(_Live(generation, Sampler(generation, IdTokenizer())))
        progress = Progress()
        for one in list(self._live):
            try:
                one.generation.push(one.sampler.choose(self._logits(one)))
            except Exception as error:
                progress.failed.append((one.generation, error))
                self.drop(one.generation)
            if one.generation.done:
                self.drop(one.generation)
        return progress

    def _logits(self, one: _Live) -> Any:
        import torch

        told = one.generation.token_ids
        ids = [told[-1]] if one.past is not None else one.generation.prompt_ids
        with torch.inference_mode():
            given = torch.tensor([ids], device=self._model.device)
            result = self._model(input_ids=given, past_key_values=one.past, use_cache=True)
        one.past = result.past_key_values
        return result.logits[0, -1].float().cpu().numpy()
