"""The generator ``scaffold`` as it runs in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime import ArrayLogits, Chunk, Engine, Generation, Tokenizer, run_batch

Array = npt.NDArray[np.float32]
WIDTH = 32


class ScaffoldGenerator:
    """Continues ids; a :class:`llmserve.runtime.protocols.SteppingGenerator`."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder  # A real one has its weights there.
        self.context_length: int | None = settings["context_length"]
        self.eos_ids = frozenset(settings["eos_ids"])
        self._runner = RecurrentRunner(settings["vocab_size"])
        self._engine: Engine | None = None

    def stepper(self, tokenizer: Tokenizer) -> Engine:
        """Return the engine: it schedules, shares pages, and chooses tokens."""
        if self._engine is None:
            self._engine = Engine(self._runner, tokenizer, max_sequences=32)
        return self._engine

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Run whole batches, for drivers that do not step."""
        run_batch(self.stepper(tokenizer), generations)


class RecurrentRunner:
    """A recurrent model with random weights; a :class:`llmserve.runtime.Runner`.

    Its cache has a row for each token: the state after that token. A transformer would keep keys
    and values there. Replace it with what computes your model.
    """

    page_count, page_size = 512, 16
    accepts_runs = True

    def __init__(self, vocab_size: int) -> None:
        random = np.random.default_rng(0)
        self._embeddings = random.normal(size=(vocab_size, WIDTH)).astype(np.float32)
        self._weights = (random.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
        self._states = np.zeros((self.page_count, self.page_size, WIDTH), np.float32)

    def run(self, chunks: Sequence[Chunk]) -> ArrayLogits:
        """Compute a pass, and the scores of the rows that the chunks ask for."""
        rows = []
        for chunk in chunks:
            states = self._compute(chunk)
            rows += states[len(states) - chunk.rows :]
        return ArrayLogits(np.array(rows, np.float32).reshape(-1, WIDTH) @ self._embeddings.T)

    def _compute(self, chunk: Chunk) -> list[Array]:
        states = []
        state = np.zeros(WIDTH, np.float32)
        if chunk.start:
            state = self._states[self._place(chunk, chunk.start - 1)]
        for position, token in enumerate(chunk.ids, chunk.start):
            state = np.tanh(self._weights @ state + self._embeddings[token])
            self._states[self._place(chunk, position)] = state
            states.append(state)
        return states

    def _place(self, chunk: Chunk, position: int) -> tuple[int, int]:
        """Return the page and the row in it of the token at a position."""
        return chunk.pages[position // self.page_size], position % self.page_size
