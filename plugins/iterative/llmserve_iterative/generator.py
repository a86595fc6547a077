"""The generator: runs the engine step by step, or over whole batches with static batching."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.plugin import IncompatibleError
from llmserve.runtime import (
    ADAPTERS,
    DEFAULT_ADAPTER_MB,
    Adapters,
    DraftModel,
    Engine,
    Generation,
    Guesser,
    ImageProcessor,
    ImageTower,
    PromptLookup,
    SeenPrompt,
    StateRunner,
    Stepper,
    Tokenizer,
    adapter_names,
    embedded_parts,
    run_batch,
    warm_pages,
)
from llmserve.runtime.causal import (
    adapter_shapes,
    context_length,
    eos_ids,
    load,
    original_length,
    try_imports,
)
from llmserve_iterative import cache_tokens

if TYPE_CHECKING:
    from llmserve_iterative.runner import Runner

LOG = logging.getLogger(__name__)


class StepwiseGenerator:
    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._model = load(settings, folder)
        self.context_length = exact_length(self._model)
        if self.context_length != (full_length := context_length(self._model)):
            LOG.warning(
                "llmserve: note: of this model's context of %s tokens, %s are served: beyond them "
                "it treats all tokens differently, which iterative cannot do. hf serves all.",
                full_length,
                self.context_length,
            )
        self.eos_ids = eos_ids(self._model)
        self._settings, self._folder = settings, folder
        self._processor = ImageProcessor(settings, folder, context_length=self.context_length)
        self.about_images = self._processor.about
        self._engine: Stepper | None = None

    # `llmserve check` calls it.
    try_imports = staticmethod(try_imports)
    # Builds and `llmserve adapter` call it.
    adapter_shapes = staticmethod(adapter_shapes)

    @property
    def adapters(self) -> list[str]:
        """The names that requests may give at the moment."""
        return adapter_names(self._folder)

    # Requests call it.
    def read_images(self, text: str, urls: Sequence[str]) -> SeenPrompt:
        """Return a conversation and the parts of its images that its tokens stand for."""
        seen = self._processor.read(text, urls)
        return replace(seen, images=embedded_parts(self._model.config, seen.ids, seen.images))

    def stepper(self, tokenizer: Tokenizer) -> Stepper:
        """Return the engine; it takes over the model, so there is only one."""
        if self._engine is None:
            tower = ImageTower(self._model) if self._processor.reads else None
            runner = self._make_runner(self._model, tower)
            # Models that were built before there were adapters have no such setting.
            budget = self._settings.get("adapter_mb", DEFAULT_ADAPTER_MB) * 1_000_000
            guesser = self._make_guesser()
            if isinstance(runner, StateRunner):
                self._note_states(runner, guesser)
                guesser = None
            self._engine = Engine(
                runner,
                tokenizer,
                max_sequences=self._settings["max_sequences"],
                prefill_chunk=self._settings["prefill_chunk"],
                guesser=guesser,
                adapters=Adapters(self._folder / ADAPTERS, runner.adapters, budget),
                warm=warm_pages(runner, self._folder),
            )
        return self._engine

    def _note_states(self, runner: StateRunner, guesser: Guesser | None) -> None:
        from llmserve_iterative.runner import OwnCacheRunner

        name = type(self._model).__name__
        if isinstance(runner, OwnCacheRunner):
            LOG.warning(
                "llmserve: note: %s has a cache of its own: its sequences are computed one after "
                "another, and share nothing.",
                name,
            )
        if guesser is not None:
            LOG.warning(
                "llmserve: note: nothing is guessed: %s keeps a state that cannot take back wrong "
                "guesses.",
                name,
            )

    def _make_runner(self, model: Any, tower: ImageTower | None = None) -> Runner:
        # Imported here because a build only inspects the class and need not load torch.
        from llmserve_iterative.runner import make_runner

        context = self.context_length or 2048
        tokens = cache_tokens(context, self._settings["max_sequences"])
        # Models that were built before there were copies of states have no such setting.
        copies = self._settings.get("state_mb", 0) * 1_000_000
        return make_runner(model, self._settings["cache_tokens"] or tokens, copies, tower)

    def _make_guesser(self) -> Guesser | None:
        # Models that were built before there were guesses have none of these settings.
        if placed := self._settings.get("draft"):
            shared = {name: self._settings[name] for name in ("device", "dtype", "pickle")}
            draft = load({**shared, **placed}, self._folder)
            runner = self._make_runner(draft)
            if isinstance(runner, StateRunner):
                raise IncompatibleError(
                    f"{type(draft).__name__} keeps a state that cannot take back wrong guesses",
                    hint="choose a draft model without one, or prompt_lookup",
                )
            return DraftModel(
                runner,
                self._settings["draft_tokens"],
                context_length=exact_length(draft),
            )
        lookup = self._settings.get("prompt_lookup", 0)
        return PromptLookup(lookup) if lookup else None

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        run_batch(self.stepper(tokenizer), generations)


def exact_length(model: Any) -> int | None:
    """Return how long a sequence may be for its answer not to depend on other sequences.

    With longrope, all tokens of a pass are rotated differently once one of them, of any sequence,
    is beyond the original context. The kernel for GPUs has no attention in parts.
    """
    config = model.config.get_text_config()
    limits = (
        original_length(config.to_dict()),
        context_length(model),
        getattr(config, "attention_chunk_size", None) if model.device.type == "cuda" else None,
    )
    return min((limit for limit in limits if limit), default=None)
