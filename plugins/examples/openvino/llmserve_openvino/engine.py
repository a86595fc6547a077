"""OpenVINO's continuous batching as a stepper: a token of every sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from openvino import Tensor
from openvino_genai import GenerationStatus

from llmserve.runtime.generation import Generation
from llmserve_openvino.wishes import generation_config


@dataclass
class Progress:
    """What a step brought, beside the tokens that were pushed."""

    failed: list[tuple[Generation, Exception]] = field(default_factory=list)


class Engine:
    """Implements :class:`llmserve.runtime.protocols.Stepper`; for one thread at a time."""

    cache_tokens = 0
    """Not known: OpenVINO tells the size of its cache in bytes."""

    def __init__(self, make_pipeline: Callable[[], Any], *, vocab_size: int) -> None:
        self._make = make_pipeline
        self._vocab_size = vocab_size
        self.pipeline = make_pipeline()
        self._numbers = count(1)
        self._handles: dict[Generation, Any] = {}

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._handles)

    @property
    def live(self) -> int:
        """How many generations are under way."""
        return len(self._handles) - self.waiting

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return sum(not generation.token_ids for generation in self._handles)

    @property
    def cache_used(self) -> int:
        """How many tokens those under way hold."""
        return sum(len(g.prompt_ids) + len(g.token_ids) for g in self._handles if g.token_ids)

    def admit(self, generation: Generation) -> None:
        """Take a generation; what OpenVINO cannot do for it is refused here."""
        config = generation_config(generation, vocab_size=self._vocab_size)
        ids = np.array([generation.prompt_ids + generation.token_ids], dtype=np.int64)
        self._handles[generation] = self.pipeline.add_request(
            next(self._numbers), Tensor(ids), config
        )

    def step(self) -> Progress:
        """Push a token into every generation that there is room for."""
        try:
            # This is where the time goes, and it lets other threads of Python run meanwhile.
            self.pipeline.step()
        except Exception:
            # A request that breaks a step stays, and would break every later one.
            self._handles.clear()
            del self.pipeline
            self.pipeline = self._make()
            raise
        progress = Progress()
        for generation, handle in list(self._handles.items()):
            while not generation.done and handle.can_read():
                for output in handle.read().values():
                    for token in output.generated_ids:
                        generation.push(token)
            if generation.done:
                self.drop(generation)
            elif handle.get_status() != GenerationStatus.RUNNING:
                self.drop(generation)
                progress.failed.append((generation, _why(handle)))
        return progress

    def drop(self, generation: Generation) -> None:
        """Forget a generation and free what it holds."""
        handle = self._handles.pop(generation, None)
        if handle is not None:
            handle.cancel()


def _why(handle: Any) -> Exception:
    if handle.get_status() == GenerationStatus.IGNORED:
        return MemoryError("the cache has no room for this request: raise cache_gb")
    return RuntimeError(f"OpenVINO left off: {handle.get_status().name}")
