"""The generator ``vllm``: a model in vLLM's engine, run step by step or over whole batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import Generation, Stepper, Tokenizer, located, run_batch

# vLLM is imported when a model is loaded: a build only inspects the class.


class VllmGenerator:
    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        from llmserve_vllm.load import Model

        self._model = Model(settings, *located(settings, folder))
        self._stepper: Stepper | None = None
        self.context_length: int | None = self._model.context_length
        self.eos_ids = self._model.eos_ids

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

            self._stepper = VllmStepper(self._model, tokenizer)
        return self._stepper

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        run_batch(self.stepper(tokenizer), generations)
