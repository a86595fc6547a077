"""The generator ``vllm``: a model in vLLM's engine, run step by step or over whole batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import (
    ADAPTERS,
    DEFAULT_ADAPTER_MB,
    Adapters,
    Generation,
    ImageProcessor,
    SeenPrompt,
    Stepper,
    Tokenizer,
    adapter_names,
    located,
    run_batch,
)
from llmserve.runtime.causal import adapter_shapes

# vLLM is imported when a model is loaded: a build only inspects the class.


class VllmGenerator:
    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        from llmserve_vllm.load import Model

        self._folder, self._settings = folder, settings
        self._model = Model(settings, *located(settings, folder), folder)
        self.context_length: int | None = self._model.context_length
        self._images = ImageProcessor(settings, folder, context_length=self.context_length)
        self.about_images = self._images.about
        self._stepper: Stepper | None = None
        self.eos_ids = self._model.eos_ids

    # Builds and `llmserve adapter` call it.
    adapter_shapes = staticmethod(adapter_shapes)

    @property
    def adapters(self) -> list[str]:
        """The names that requests may give at the moment."""
        return adapter_names(self._folder)

    def read_images(self, text: str, urls: Sequence[str]) -> SeenPrompt:
        """Return a conversation and its images as vLLM's own processor makes them."""
        return self._model.seen(*self._images.marked(text, urls))

    @staticmethod
    def environment(settings: Mapping[str, Any], folder: Path) -> Mapping[str, str]:
        """Return variables that have to be set before anything loads PyTorch."""
        del settings, folder
        from llmserve_vllm.threads import variables

        return variables()

    @staticmethod
    def try_imports(settings: Mapping[str, Any], folder: Path) -> None:
        """Import what loads the model; ``llmserve check`` calls it."""
        del settings, folder
        try:
            import llmserve_vllm.library  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            raise ModuleNotFoundError(
                "vLLM is not installed here: it is in the image that the Dockerfile names, and "
                "llmserve-vllm[engine] adds it elsewhere"
            ) from None

    def stepper(self, tokenizer: Tokenizer) -> Stepper:
        if self._stepper is None:
            from llmserve_vllm.engine import VllmStepper

            # Models that were built before there were adapters have no such setting.
            budget = self._settings.get("adapter_mb", DEFAULT_ADAPTER_MB) * 1_000_000
            adapters = Adapters(self._folder / ADAPTERS, self._model.adapters, budget)
            self._stepper = VllmStepper(self._model, tokenizer, adapters)
        return self._stepper

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        run_batch(self.stepper(tokenizer), generations)
