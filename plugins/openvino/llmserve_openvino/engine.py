"""OpenVINO GenAI's continuous batching in the shape of a stepper, and of a generator of batches.

OpenVINO chooses the tokens. When an answer ends is for llmserve to say, so that stop words,
cancellation and lengths are what they are everywhere.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.runtime import Generation, Progress, RequestError, Tokenizer, contract, run_batch
from llmserve_openvino.library import openvino, openvino_genai

LOG = logging.getLogger(__name__)
# Below this temperature the likeliest token is all that is left of a distribution.
_GREEDY_BELOW = 1e-5
_UINT32 = (1 << 32) - 1
_UNLIMITED = 1 << 30
# What follows the last time that so many tokens stood in the prompt is what is tried.
_NGRAM = 3
_CAPABILITIES = {"bf16": "BF16", "f16": "FP16"}


class OpenVinoGenerator:
    """A converted model with its scheduler and cache; the runtime of the generator ``openvino``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self.context_length: int | None = settings["context_length"]
        self.eos_ids = frozenset(settings["eos_ids"])
        home = folder / settings["path"]
        precision = _precision(settings["precision"], half=settings["half_weights"])
        cache = settings["kv_cache"]
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = settings["cache_gb"]
        scheduling.max_num_seqs = settings["max_sequences"]
        scheduling.enable_prefix_caching = settings["prefix_cache"]
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision if cache == "auto" else cache,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": settings["dynamic_quantization"],
        }
        # OpenVINO has threads of its own, and asks no variable of OpenMP's for their number.
        if threads := settings["threads"] or int(os.environ.get(contract.THREADS, 0)):
            properties["INFERENCE_NUM_THREADS"] = threads
        lookup = settings["prompt_lookup"]
        if lookup:
            properties["prompt_lookup"] = True
        draft = settings["draft"]
        guesses = settings["draft_tokens"] if draft else lookup
        if guesses:
            # Where a prompt takes several steps beside guesses, OpenVINO (2026.4) loses count and
            # answers wrongly. So a step reads all that have come, however long.
            scheduling.max_num_batched_tokens = _UNLIMITED

        def make() -> Any:
            whole = dict(properties)
            if draft:
                place = str(folder / draft)
                whole["draft_model"] = openvino_genai.draft_model(place, "CPU", **properties)
            return openvino_genai.ContinuousBatchingPipeline(str(home), scheduling, "CPU", whole)

        self.engine = Engine(
            make, vocab_size=settings["vocab_size"], guesses=guesses, draft=bool(draft)
        )

    def stepper(self, tokenizer: Tokenizer) -> Engine:
        """Return the engine, for a driver that decides when a step is made."""
        del tokenizer
        return self.engine

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Run one batch until every row is done."""
        del tokenizer
        run_batch(self.engine, generations)


class Engine:
    """Implements :class:`llmserve.runtime.Stepper`; for one thread at a time."""

    cache_tokens = 0
    """Not known: OpenVINO tells the size of its cache in bytes."""

    def __init__(
        self,
        make_pipeline: Callable[[], Any],
        *,
        vocab_size: int,
        guesses: int = 0,
        draft: bool = False,
    ) -> None:
        self._make = make_pipeline
        self._vocab_size = vocab_size
        self._guesses = guesses
        self._draft = draft
        self.pipeline = make_pipeline()
        self._numbers = count(1)
        self._handles: dict[Generation, Any] = {}

    @property
    def busy(self) -> bool:
        return bool(self._handles)

    @property
    def live(self) -> int:
        return len(self._handles) - self.waiting

    @property
    def waiting(self) -> int:
        return sum(not generation.token_ids for generation in self._handles)

    @property
    def cache_used(self) -> int:
        return sum(len(g.prompt_ids) + len(g.token_ids) for g in self._handles if g.token_ids)

    def admit(self, generation: Generation) -> None:
        """Take a generation; what OpenVINO cannot do for it is refused here."""
        config = generation_config(generation, vocab_size=self._vocab_size)
        if self._guesses:
            guesser = "a draft model" if self._draft else "prompt_lookup"
            if generation.params.min_tokens:
                raise RequestError(f"this model does not take min_tokens: it has {guesser}")
            config.num_assistant_tokens = self._guesses
            if not self._draft:
                config.max_ngram_size = _NGRAM
            elif config.do_sample:
                # A drawn token that is not the guessed one breaks OpenVINO's books (2026.4).
                raise RequestError("this model answers without temperature: it has a draft model")
        ids = np.array([generation.prompt_ids + generation.token_ids], dtype=np.int64)
        self._handles[generation] = self.pipeline.add_request(
            next(self._numbers), openvino.Tensor(ids), config
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
            elif handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                self.drop(generation)
                progress.failed.append((generation, _reason(handle)))
        return progress

    def drop(self, generation: Generation) -> None:
        """Forget a generation and free what it holds."""
        handle = self._handles.pop(generation, None)
        if handle is not None:
            handle.cancel()


def generation_config(generation: Generation, *, vocab_size: int) -> Any:
    """Return what a request asks for in OpenVINO's terms; refuse what OpenVINO cannot do."""
    params, config = generation.params, openvino_genai.GenerationConfig()
    config.max_new_tokens = generation.max_tokens - len(generation.token_ids)
    # OpenVINO writes into its scores at these, wherever that is, and a request may name any.
    ends = sorted(token for token in generation.eos_ids if token < vocab_size)
    # What must not end yet has to be said here, where tokens are chosen.
    config.ignore_eos = not (params.min_tokens and ends)
    # Without one it would look for a tokenizer's, which is not there.
    config.eos_token_id = ends[0] if ends else 0
    config.stop_token_ids = set(ends or [0])
    if not config.ignore_eos:
        config.min_new_tokens = params.min_tokens
    config.repetition_penalty = params.repetition_penalty
    config.presence_penalty = _penalty("presence_penalty", params.presence_penalty)
    config.frequency_penalty = _penalty("frequency_penalty", params.frequency_penalty)
    if params.effective_temperature >= _GREEDY_BELOW and params.top_k != 1:
        config.do_sample = True
        config.temperature = params.effective_temperature
        config.top_p = params.top_p
        config.min_p = params.min_p
        if params.top_k > 0:
            config.top_k = params.top_k
        # It takes 32 bits of a seed, and 0 for who names none.
        seed = secrets.randbits(32) if params.seed is None else params.seed
        config.rng_seed = (seed ^ seed >> 32) & _UINT32
    try:
        config.validate()
    except RuntimeError as error:
        last = str(error).strip().splitlines()[-1]
        raise RequestError(f"OpenVINO does not take this: {last}") from None
    return config


def _precision(asked: str, *, half: bool) -> str:
    """Return what is computed in, chosen on the machine that serves."""
    has = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if asked == "auto":
        # A checkpoint in float32 keeps its precision.
        return "bf16" if half and _CAPABILITIES["bf16"] in has else "f32"
    if asked in _CAPABILITIES and _CAPABILITIES[asked] not in has:
        LOG.warning(
            "llmserve: note: %s was asked for, and this processor has no instructions for it: "
            "expect float32's speed at best. Build with --dtype auto or --dtype float32.",
            asked,
        )
    return asked


def _penalty(name: str, value: float) -> float:
    if not -2 <= value <= 2:
        raise RequestError(f"{name} must be from -2 to 2 on this model, not {value:g}")
    return value


def _reason(handle: Any) -> Exception:
    if handle.get_status() == openvino_genai.GenerationStatus.IGNORED:
        return MemoryError("the cache has no room for this request: raise cache_gb")
    return RuntimeError(f"OpenVINO left off: {handle.get_status().name}")
