"""Which way a model runs: the fastest that gives the model's own results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from llmserve.errors import IncompatibleError
from llmserve.runtime.generation import Generation
from llmserve.runtime.params import Params
from llmserve_iterative.engine.arena import Extent
from llmserve_iterative.engine.flat import FlatRunner
from llmserve_iterative.engine.fused import fuse
from llmserve_iterative.engine.kernels import make_kernels
from llmserve_iterative.engine.packed import can_pack, pack
from llmserve_iterative.engine.padded import PaddedRunner
from llmserve_iterative.engine.sequence import Sequence as Running
from llmserve_iterative.engine.span import Span

LOG = logging.getLogger(__name__)


class Runner(Protocol):
    """Turns spans of tokens into logits."""

    way: str

    def run(self, spans: Sequence[Span]) -> torch.Tensor:
        """Return the logits after the last token of each span, one row per span."""

    def copy(self, source: Extent, target: Extent, tokens: int) -> None:
        """Copy the keys and values of a sequence's first tokens to another extent."""


def make_runner(model: Any, places: int) -> Runner:
    """Return the first runner that agrees with the model about a short trial."""
    trial = Trial(model)
    # The trial itself needs a little room, however small the cache.
    places = max(places, Trial.PLACES)
    own_attention = model.config._attn_implementation
    fuse(model)
    if can_pack(model):
        pack(model)
    if getattr(model, "_supports_attention_backend", False):
        kernels = make_kernels(model.dtype, model.device, places)
        for ours in (kernels, None) if kernels else (None,):
            runner = trial.passed(partial(FlatRunner, model, places, ours))
            if runner is not None:
                return runner
        model.set_attn_implementation(own_attention)
    runner = trial.passed(lambda: PaddedRunner(model, places))
    if runner is None:
        raise IncompatibleError(
            f"{type(model).__name__} cannot be decoded token by token with a cache of keys and "
            f"values ({trial.reason})",
            mend="serve it with the plugin hf",
        )
    return runner


class Trial:
    """Two short sequences, whose logits the untouched model tells."""

    PLACES = 32

    def __init__(self, model: Any) -> None:
        self.reason = ""
        size = model.config.get_text_config().vocab_size
        self._ids = [[(7 * i + 3) % size for i in range(9)], [(5 * i + 1) % size for i in range(6)]]
        with torch.inference_mode():
            self._expected = torch.stack(
                [model(torch.tensor([ids], device=model.device)).logits[0, -1] for ids in self._ids]
            )

    def passed(self, make: Callable[[], Runner]) -> Runner | None:
        """Return the runner if it can be made and agrees; else tell the log why not."""
        try:
            runner = make()
            logits = self._logits(runner)
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
            LOG.info("a runner does not suit this model: %s", self.reason)
            return None
        rough = 1e-3 if logits.dtype == torch.float32 else 0.1
        apart = (logits - self._expected).abs().max().item()
        if apart <= rough * max(1.0, self._expected.abs().max().item()):
            return runner
        self.reason = f"its logits are off by {apart:.2g}"
        LOG.info("a runner does not suit this model: %s", self.reason)
        return None

    def _logits(self, runner: Runner) -> torch.Tensor:
        sequences = [_sequence(ids, 16 * n) for n, ids in enumerate(self._ids)]
        runner.run([Span(s, 0, 4) for s in sequences])
        runner.run([Span(sequences[0], 4, 8), Span(sequences[1], 4, 5)])
        return runner.run([Span(s, s.length - 1, s.length) for s in sequences])


def _sequence(ids: list[int], place: int) -> Running:
    silent = Generation(ids, Params(), max_tokens=1, eos_ids=frozenset(), decode=lambda _: "")
    return Running(silent, None, Extent(place, 16))  # type: ignore[arg-type]
