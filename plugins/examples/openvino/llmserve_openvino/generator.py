"""The runtime of the generator ``openvino``: a pipeline, stepped or run for whole batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openvino_genai import ContinuousBatchingPipeline, SchedulerConfig

from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Tokenizer
from llmserve_openvino.engine import Engine


class OpenVinoGenerator:
    """A converted model with its scheduler and cache."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self.context_length: int | None = settings["context_length"]
        self.eos_ids = frozenset(settings["eos_ids"])
        home = folder / settings["path"]
        scheduling = SchedulerConfig()
        scheduling.cache_size = settings["cache_gb"]
        scheduling.max_num_seqs = settings["max_sequences"]
        scheduling.enable_prefix_caching = settings["prefix_cache"]
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": settings["precision"],
            "KV_CACHE_PRECISION": settings["kv_cache"],
        }
        if settings["threads"]:
            properties["INFERENCE_NUM_THREADS"] = settings["threads"]

        def make() -> Any:
            return ContinuousBatchingPipeline(str(home), scheduling, "CPU", properties)

        self.engine = Engine(make, vocab_size=settings["vocab_size"])

    def stepper(self, tokenizer: Tokenizer) -> Engine:
        """Return the engine, for a driver that decides when a step is made."""
        del tokenizer
        return self.engine

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Run one batch until every row is done."""
        del tokenizer
        try:
            for generation in generations:
                self.engine.admit(generation)
            while self.engine.busy:
                for _, error in self.engine.step().failed:
                    raise error
        finally:
            for generation in generations:
                self.engine.drop(generation)
