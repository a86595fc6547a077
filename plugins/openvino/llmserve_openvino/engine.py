"""The generator ``openvino``: the core's engine over a converted model, and its guesses."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmserve.graphs import openvino
from llmserve.plugin import IncompatibleError
from llmserve.runtime import (
    ADAPTERS,
    DEFAULT_ADAPTER_MB,
    Adapters,
    DraftModel,
    Embedded,
    Engine,
    Generation,
    Guesser,
    ImageProcessor,
    ImageTower,
    Lora,
    ProductShapes,
    PromptLookup,
    RequestError,
    SeenPrompt,
    StateRunner,
    Tokenizer,
    adapter_names,
    adapters_of,
    contract,
    embedded_parts,
    run_batch,
    warm_pages,
)
from llmserve_openvino.embedded_rows import Embeds
from llmserve_openvino.lora import product_shapes
from llmserve_openvino.runner import OpenVinoRunner, make_runner
from llmserve_openvino.workarounds import read_model

LOG = logging.getLogger(__name__)
_MODEL = "openvino_model.xml"
_CAPABILITIES = {"bf16": "BF16", "f16": "FP16"}
_CONVERTED = ("f16", "u8")
_GB = 1 << 30
# Of a model that does not say how long its texts may be.
_CONTEXT = 2048


class OpenVinoGenerator:
    """A converted model with its cache; the runtime of the generator ``openvino``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self.context_length: int | None = settings["context_length"]
        self.eos_ids = frozenset(settings["eos_ids"])
        self._settings = settings
        self._properties = _properties(settings)
        self._folder = folder
        # Models that were built before openvino read images have no such setting.
        images = settings.get("images") or {}
        self._processor = ImageProcessor(images, folder, context_length=self.context_length)
        self.about_images = self._processor.about
        self._sight = self._load_sight(images) if self._processor.reads else None
        self._runner = self._make_runner(
            folder / settings["path"],
            [lora for lora in adapters_of(folder).values() if isinstance(lora, Lora)],
            # Models that were built before there was the option have no such setting.
            exact=settings.get("exact_batches", False),
            embeds=ImageTower(self._sight) if self._sight is not None else None,
        )
        self._guesser = self._make_guesser(folder)
        self._engine: Engine | None = None

    @staticmethod
    def adapter_shapes(settings: Mapping[str, Any], folder: Path) -> ProductShapes:
        """Return the shapes of the products to which adapters may add."""
        return product_shapes(read_model(str(folder / settings["path"] / _MODEL)))

    @property
    def adapters(self) -> list[str]:
        """The names that requests may give at the moment."""
        return adapter_names(self._folder)

    # Requests call it.
    def read_images(self, text: str, urls: Sequence[str]) -> SeenPrompt:
        """Return a conversation and the parts of its images that its tokens stand for."""
        seen = self._processor.read(text, urls)
        if not self._sight:
            return replace(seen, images=())
        parts = embedded_parts(self._sight.config, seen.ids, seen.images)
        if any(part.in_windows for part in parts):
            _check_windows(parts, self._sight.config.get_text_config().sliding_window)
        return replace(seen, images=parts)

    def stepper(self, tokenizer: Tokenizer) -> Engine:
        if self._engine is None:
            # Models that were built before there were adapters have no such setting.
            budget = self._settings.get("adapter_mb", DEFAULT_ADAPTER_MB) * 1_000_000
            self._engine = Engine(
                self._runner,
                tokenizer,
                max_sequences=self._settings["max_sequences"],
                share_prefixes=self._settings["prefix_cache"],
                guesser=self._guesser,
                adapters=Adapters(self._folder / ADAPTERS, self._runner.adapters, budget),
                warm=warm_pages(self._runner, self._folder),
            )
        return self._engine

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        run_batch(self.stepper(tokenizer), generations)

    def _load_sight(self, settings: Mapping[str, Any]) -> Any:
        """Return the part of the model that reads images."""
        import torch

        from llmserve.runtime.causal import load

        if threads := self._properties.get("INFERENCE_NUM_THREADS"):
            # The process is the model's own.
            torch.set_num_threads(threads)
        half = self._properties["INFERENCE_PRECISION_HINT"] == "bf16"
        dtype = "bfloat16" if half else "float32"
        return load({**settings, "device": "cpu", "dtype": dtype}, self._folder)

    def _make_runner(
        self,
        folder: Path,
        expected: Iterable[Lora] = (),
        *,
        exact: bool = False,
        embeds: Embeds | None = None,
    ) -> OpenVinoRunner:
        context = self.context_length or _CONTEXT
        return make_runner(
            folder / _MODEL,
            self._properties,
            cache_tokens=max(4 * context, self._settings["max_sequences"] * context // 4),
            cache_bytes=self._settings["cache_gb"] * _GB,
            sequences=self._settings["max_sequences"],
            # Models that were built before there were copies of states have no such setting.
            copies_bytes=self._settings.get("state_mb", 0) * 1_000_000,
            expected=expected,
            exact=exact,
            embeds=embeds,
        )

    def _make_guesser(self, folder: Path) -> Guesser | None:
        if draft := self._settings["draft"]:
            # Its guesses change no answer, so it need not be exact.
            runner = self._make_runner(folder / draft)
            if isinstance(runner, StateRunner):
                raise IncompatibleError(
                    "the draft model keeps a state that cannot take back wrong guesses",
                    hint="choose a draft model without one, or prompt_lookup",
                )
            return DraftModel(
                runner,
                self._settings["draft_tokens"],
                context_length=self._settings.get("draft_length"),
            )
        lookup = self._settings["prompt_lookup"]
        return PromptLookup(lookup) if lookup else None


def _check_windows(parts: Sequence[Embedded], window: int) -> None:
    """Refuse an image whose tokens see each other, and of which not all are within a window.

    OpenVINO lets each see all others nonetheless (2026.4.1).
    """
    if (most := max(part.count for part in parts)) > window:
        raise RequestError(
            f"an image has {most} tokens, more than the {window} of the model's window",
            code="invalid_value",
            param="image_url",
        )


def _properties(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return how OpenVINO is to compute, on the machine that serves the model."""
    precision = _precision(settings["precision"], half=settings["half_weights"])
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": _cache_type(settings["kv_cache"], precision),
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": settings["dynamic_quantization"],
    }
    # OpenVINO has its own threads, and ignores OpenMP's variables for their number.
    if threads := settings["threads"] or int(os.environ.get(contract.THREADS, 0)):
        properties["INFERENCE_NUM_THREADS"] = threads
    return properties


def _cache_type(name: str, precision: str) -> str:
    """Return the type of the cache: that to compute in, or one that OpenVINO converts itself."""
    if name in _CONVERTED:
        return name
    if name not in ("auto", precision):
        LOG.warning(
            "llmserve: note: the cache is in %s, not in %s: OpenVINO has it in the type that is "
            "computed, or in %s.", precision, name, " or ".join(_CONVERTED),
        )  # fmt: skip
    return precision


def _precision(name: str, *, half: bool) -> str:
    """Return the type to compute in, chosen on the machine that serves the model."""
    supported = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if name == "auto":
        # A checkpoint in float32 keeps its precision.
        return "bf16" if half and _CAPABILITIES["bf16"] in supported else "f32"
    if name in _CAPABILITIES and _CAPABILITIES[name] not in supported:
        LOG.warning(
            "llmserve: note: %s was asked for, and this processor has no instructions for it: "
            "expect float32's speed at best. Build with --dtype auto or --dtype float32.",
            name,
        )
    return name
