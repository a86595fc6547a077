"""Computes values of texts with transformers, in passes of texts of like lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmserve.runtime import Generation, Tokenizer, causal
from llmserve_embed.packing import packs

# torch and transformers are imported when a model is loaded: a build only inspects the classes.

Ids = npt.NDArray[np.int64]


class Network(Protocol):
    """A model with what follows it: a value for each row of padded ids."""

    padding: int
    pass_cost: int
    """What a pass costs however short it is, in tokens: padding that costs more is not worth it."""
    streams: int
    """How many passes it computes at the same time, each called for in a thread of its own."""

    def __call__(self, ids: Ids, mask: Ids, segments: Ids) -> npt.NDArray[np.float32]: ...


class Packed:
    """A generator that answers with values; passes are made of the texts of a batch."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, settings: Mapping[str, Any], network: Network) -> None:
        self.context_length: int | None = settings["max_length"]
        self._batch_tokens: int = settings["batch_tokens"]
        self._network = network
        self._pool = ThreadPoolExecutor(network.streams) if network.streams > 1 else None

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Finish each generation with its value; those of short texts are finished first."""
        del tokenizer
        lengths = [len(generation.prompt_ids) for generation in generations]
        divided = packs(lengths, self._batch_tokens, self._network.pass_cost)
        passes = [[generations[position] for position in positions] for positions in divided]
        # The values of a pass are sent as soon as those of all shorter texts are.
        computed = (self._pool.map if self._pool else map)(self._compute, passes)
        for together, values in zip(passes, computed, strict=True):
            for generation, value in zip(together, values, strict=True):
                generation.finish(value)

    def _compute(self, generations: Sequence[Generation]) -> npt.NDArray[np.float32]:
        shape = len(generations), max(len(generation.prompt_ids) for generation in generations)
        ids = np.full(shape, self._network.padding, dtype=np.int64)
        mask, segments = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for row, generation in enumerate(generations):
            length = len(generation.prompt_ids)
            ids[row, :length] = generation.prompt_ids
            mask[row, :length] = 1
            if generation.segments is not None:
                segments[row, :length] = generation.segments
        return self._network(ids, mask, segments)


class TorchEncoder(Packed):
    """A transformer and its pooling; the runtime of the generator ``encoder``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        from llmserve_embed.network import TorchNetwork, pooled

        model = load(settings, folder)
        network = TorchNetwork(model, pooled(settings["pooling"]), settings["padding"])
        super().__init__(settings, network)

    @staticmethod
    def try_imports(settings: Mapping[str, Any], folder: Path) -> None:
        """Import what loads the model; `llmserve check` calls it."""
        causal.try_imports(settings, folder, loader=settings["loader"])


class TorchClassifier(Packed):
    """A transformer with a head for classes; the runtime of the generator ``classifier``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        from llmserve_embed.network import TorchNetwork, logits

        network = TorchNetwork(load(settings, folder), logits, settings["padding"])
        super().__init__(settings, network)

    try_imports = staticmethod(TorchEncoder.try_imports)


class OpenVinoValues(Packed):
    """A model that the build has converted, with its pooling if it has one; the runtime of the
    generators ``encoder-openvino`` and ``classifier-openvino``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        from llmserve_embed.compiled import OpenVinoNetwork, properties

        network = OpenVinoNetwork(
            folder / settings["path"],
            settings.get("pooling"),
            settings["padding"],
            properties(settings),
        )
        super().__init__(settings, network)


def load(settings: Mapping[str, Any], folder: Path) -> Any:
    from llmserve.runtime import speed_up

    model = causal.load(settings, folder, loader=settings["loader"])
    # A model spread over devices keeps its modules: they know where their weights are.
    if model.device.type == "cpu" and settings["device"] != "balanced":
        speed_up(model)
    return model
