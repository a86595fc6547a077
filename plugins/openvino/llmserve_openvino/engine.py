"""OpenVINO GenAI's continuous batching as a stepper, and as a generator of whole batches.

OpenVINO chooses the tokens. llmserve decides when an answer ends, so that stop words, cancellation
and lengths work as they do everywhere.
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
# Below this temperature, practically only the likeliest token is left of a distribution.
_GREEDY_BELOW = 1e-5
_UINT32 = (1 << 32) - 1
_UNLIMITED = 1 << 30
# A guess is what followed the last occurrence of this many tokens in the prompt.
_NGRAM = 3
_CAPABILITIES = {"bf16": "BF16", "f16": "FP16"}


class OpenVinoGenerator:
    """A converted model with its scheduler and cache; the runtime of the generator ``openvino``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self.context_length: int | None = settings["context_length"]
        self.eos_ids = frozenset(settings["eos_ids"])
        model_path = str(folder / settings["path"])
        precision = _precision(settings["precision"], half=settings["half_weights"])
        cache_type = settings["kv_cache"]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = settings["cache_gb"]
        scheduler.max_num_seqs = settings["max_sequences"]
        scheduler.enable_prefix_caching = settings["prefix_cache"]
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision if cache_type == "auto" else cache_type,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": settings["dynamic_quantization"],
        }
        # OpenVINO has its own threads, and ignores OpenMP's variables for their number.
        if threads := settings["threads"] or int(os.environ.get(contract.THREADS, 0)):
            properties["INFERENCE_NUM_THREADS"] = threads
        lookup = settings["prompt_lookup"]
        if lookup:
            properties["prompt_lookup"] = True
        draft = settings["draft"]
        guesses = settings["draft_tokens"] if draft else lookup
        if guesses:
            # If a prompt takes several steps while there are guesses, OpenVINO (2026.4) loses count
            # and answers wrongly. So a step reads all prompts that have arrived, however long.
            scheduler.max_num_batched_tokens = _UNLIMITED

        def create_pipeline() -> Any:
            options = dict(properties)
            if draft:
                draft_path = str(folder / draft)
                options["draft_model"] = openvino_genai.draft_model(draft_path, "CPU", **properties)
            return openvino_genai.ContinuousBatchingPipeline(model_path, scheduler, "CPU", options)

        self.engine = Engine(
            create_pipeline, vocab_size=settings["vocab_size"], guesses=guesses, draft=bool(draft)
        )

    def stepper(self, tokenizer: Tokenizer) -> Engine:
        del tokenizer
        return self.engine

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        del tokenizer
        run_batch(self.engine, generations)


class Engine:
    """Implements :class:`llmserve.runtime.Stepper`; only one thread at a time may use it."""

    cache_tokens = 0
    """Unknown: OpenVINO reports the size of its cache in bytes."""

    def __init__(
        self,
        create_pipeline: Callable[[], Any],
        *,
        vocab_size: int,
        guesses: int = 0,
        draft: bool = False,
    ) -> None:
        self._create_pipeline = create_pipeline
        self._vocab_size = vocab_size
        self._guesses = guesses
        self._draft = draft
        self.pipeline = create_pipeline()
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
        """Accept a generation; refuse one that OpenVINO cannot run."""
        config = generation_config(generation, vocab_size=self._vocab_size)
        if self._guesses:
            guesser = "a draft model" if self._draft else "prompt_lookup"
            if generation.params.min_tokens:
                raise _unsupported(
                    "min_tokens", f"this model does not take min_tokens: it has {guesser}"
                )
            config.num_assistant_tokens = self._guesses
            if not self._draft:
                config.max_ngram_size = _NGRAM
            elif config.do_sample:
                # A sampled token other than the guess breaks OpenVINO's bookkeeping (2026.4).
                raise _unsupported(
                    "temperature", "this model cannot use a temperature: it has a draft model"
                )
        ids = np.array([generation.prompt_ids + generation.token_ids], dtype=np.int64)
        self._handles[generation] = self.pipeline.add_request(
            next(self._numbers), openvino.Tensor(ids), config
        )

    def step(self) -> Progress:
        """Push a token into every generation that the cache has space for."""
        try:
            # This takes nearly all the time, and other Python threads can run meanwhile.
            self.pipeline.step()
        except Exception:
            # The request that broke the step would stay, and break every later one.
            self._handles.clear()
            del self.pipeline
            self.pipeline = self._create_pipeline()
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
        """Remove a generation and free its resources."""
        handle = self._handles.pop(generation, None)
        if handle is not None:
            handle.cancel()


def generation_config(generation: Generation, *, vocab_size: int) -> Any:
    """Return a request's parameters in OpenVINO's form; refuse what OpenVINO cannot do."""
    params, config = generation.params, openvino_genai.GenerationConfig()
    config.max_new_tokens = generation.max_tokens - len(generation.token_ids)
    # OpenVINO writes to the scores of these without a bounds check, and a request may name any.
    ends = sorted(token for token in generation.eos_ids if token < vocab_size)
    # OpenVINO, which chooses the tokens, must know which may not come before min_tokens.
    config.ignore_eos = not (params.min_tokens and ends)
    # Without an end token, OpenVINO would look for the tokenizer's, which does not exist.
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
        # OpenVINO uses 32 bits of a seed, and 0 if there is none.
        seed = secrets.randbits(32) if params.seed is None else params.seed
        config.rng_seed = (seed ^ seed >> 32) & _UINT32
    try:
        config.validate()
    except RuntimeError as error:
        last_line = str(error).strip().splitlines()[-1]
        problem = f"OpenVINO refuses these parameters: {last_line}"
        raise RequestError(problem, code="invalid_value") from None
    return config


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


def _unsupported(name: str, problem: str) -> RequestError:
    return RequestError(problem, code="unsupported_option", param=name)


def _penalty(name: str, value: float) -> float:
    if not -2 <= value <= 2:
        problem = f"{name} must be from -2 to 2 on this model, not {value:g}"
        raise RequestError(problem, code="invalid_value", param=name)
    return value


def _reason(handle: Any) -> Exception:
    if handle.get_status() == openvino_genai.GenerationStatus.IGNORED:
        return MemoryError("the cache has no space for this request: raise cache_gb")
    return RuntimeError(f"OpenVINO stopped this request: {handle.get_status().name}")
