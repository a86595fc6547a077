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
        """Return the engine: it schedules, shares beginnings, and chooses tokens."""
        if self._engine is None:
            self._engine = Engine(self._runner, tokenizer, max_sequences=32)
        return self._engine

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Run whole batches, for drivers that do not step."""
        run_batch(self.stepper(tokenizer), generations)


class RecurrentRunner:
    """A recurrent model with random weights; a :class:`llmserve.runtime.StateRunner`.

    It keeps the newest state of each sequence, so pages only count tokens. A transformer would keep
    keys and values in them, as a :class:`llmserve.runtime.Runner` without ``copy`` and ``forget``.
    Replace it with what computes your model.
    """

    page_count, page_size = 512, 16
    accepts_runs = False  # There is no way back from a wrong guess.
    most_copies = 1024

    def __init__(self, vocab_size: int) -> None:
        random = np.random.default_rng(0)
        self._embeddings = random.normal(size=(vocab_size, WIDTH)).astype(np.float32)
        self._weights = (random.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
        self._states: dict[int, Array] = {}

    def copy(self, state: int, copy: int) -> None:
        """Keep a state for sequences that begin alike."""
        self._states[copy] = self._states[state].copy()

    def forget(self, state: int) -> None:
        """Free the state of a sequence that has ended, or a copy."""
        self._states.pop(state, None)

    def run(self, chunks: Sequence[Chunk]) -> ArrayLogits:
        """Compute a pass, and the scores of the rows that the chunks ask for."""
        rows = []
        for chunk in chunks:
            states = self._compute(chunk)
            rows += states[len(states) - chunk.rows :]
        return ArrayLogits(np.array(rows, np.float32).reshape(-1, WIDTH) @ self._embeddings.T)

    def _compute(self, chunk: Chunk) -> list[Array]:
        states = []
        state = self._states[chunk.state] if chunk.start else np.zeros(WIDTH, np.float32)
        for token in chunk.ids:
            state = np.tanh(self._weights @ state + self._embeddings[token])
            states.append(state)
        self._states[chunk.state] = state
        return states
