"""Loads a model into vLLM's engine, on the machine that serves it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import RequestError, SeenPrompt
from llmserve.runtime.contract import IMAGE_LIMITS
from llmserve_vllm import library, workarounds
from llmserve_vllm.adapters import VllmAdapters, lora_arguments
from llmserve_vllm.translate import first_line

LOG = logging.getLogger(__name__)
# On a CPU, vLLM would take nearly all memory for its cache.
_CACHED_CONTEXTS, _CACHED_SEQUENCES = 4, 32
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Usage(library.StatLoggerBase):  # type: ignore[misc]
    """What vLLM reports of its queue and its cache after each step."""

    def __init__(self) -> None:
        self.waiting = self.guessed = self.accepted = 0
        self.cache_share = 0.0

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is None:
            return
        self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self.cache_share = scheduler_stats.kv_cache_usage
        if guesses := scheduler_stats.spec_decoding_stats:
            self.guessed += guesses.num_draft_tokens
            self.accepted += guesses.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Say nothing: Triton says that the model is loaded."""


class Model:
    """A model and the engine that it is loaded in; a discarded engine is replaced on next use."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        location: str,
        options: Mapping[str, Any],
        version: Path,
    ) -> None:
        _check_device(settings["device"])
        self._arguments = {
            **_arguments(settings, location, options),
            **lora_arguments(version, settings["engine_args"]),
        }
        self.adapters = VllmAdapters(
            lambda: self.engine,
            # A choice for adapters that there are none of yet is none.
            self._arguments["max_lora_rank"] if self._arguments.get("enable_lora") else 0,
            location,
            options,
        )
        if self._arguments.get("enable_lora") and library.current_platform.is_cpu():
            workarounds.leave_rows_without_adapters()
        self.has_classes = self._arguments.get("scheduling_policy") == "priority"
        """Whether vLLM is told the classes of requests, which it only heeds under this policy."""
        self.usage = Usage()
        self._engine: Any = self._load()
        # Requests are read in another thread than the one that may load the engine again.
        self._renderer = self._engine.renderer
        config = self._engine.vllm_config
        self.context_length = int(config.model_config.max_model_len)
        self.vocabulary = int(config.model_config.get_vocab_size())
        cache = config.cache_config
        self.cache_tokens = int(cache.num_gpu_blocks * cache.block_size)
        self.eos_ids = _eos_ids(config.model_config)

    @property
    def engine(self) -> Any:
        if self._engine is None:
            LOG.warning("llmserve: the model is loaded again, because a step of vLLM has failed")
            self._engine = self._load()
        return self._engine

    def seen(self, ids: Sequence[int], images: Sequence[Any]) -> SeenPrompt:
        """Return what vLLM makes of a prompt that has a mark for each image, and of the images."""
        prompt = {"prompt_token_ids": [*ids], "multi_modal_data": {"image": [*images]}}
        try:
            (found,) = self._renderer.render_cmpl([prompt])
        except ValueError as error:
            problem = f"vLLM refuses these images: {first_line(error)}"
            raise RequestError(problem, code="invalid_value", param="image_url") from None
        return SeenPrompt([*found["prompt_token_ids"]], found)

    def discard(self) -> None:
        """Free an engine that has failed."""
        engine, self._engine = self._engine, None
        self.usage.waiting, self.usage.cache_share = 0, 0.0
        try:
            workarounds.end_engine(engine)
        except Exception:
            LOG.exception("llmserve: a failed engine of vLLM could not be ended")

    def _load(self) -> Any:
        if self._arguments.get("enforce_eager"):
            workarounds.compile_nothing()
        if library.current_platform.is_cpu():
            workarounds.keep_seeds()
        config = library.EngineArgs(**self._arguments).create_engine_config()
        sizes = ("gpu_memory_utilization", "kv_cache_memory_bytes")
        chosen = any(name in self._arguments for name in sizes)
        if library.current_platform.is_cpu() and not chosen:
            config.cache_config.kv_cache_memory_bytes = _cache_bytes(config)
        return library.LLMEngine.from_vllm_config(config, stat_loggers=[lambda *_: self.usage])


def _arguments(
    settings: Mapping[str, Any], location: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of vLLM's ``EngineArgs``."""
    arguments = {
        "model": location,
        "tokenizer": location,
        "trust_remote_code": options["trust_remote_code"],
        "dtype": settings["dtype"],
        # Those that check constraints before vLLM does: a form means the same to both.
        "structured_outputs_config": {"backend": "guidance"},
        **_image_arguments(settings),
        **settings["engine_args"],
    }
    if revision := options.get("revision"):
        arguments |= {"revision": revision, "tokenizer_revision": revision}
    return arguments


def _image_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a model that reads images."""
    if IMAGE_LIMITS not in settings:
        return {}
    # Its cache of what it made of images has to see them in the order in which the engine gets
    # them, and a request that is read may be refused before.
    return {
        "limit_mm_per_prompt": {"image": settings[IMAGE_LIMITS]["images"]},
        "mm_processor_cache_gb": 0,
    }


def _check_device(device: str) -> None:
    has = library.current_platform.device_type
    if device not in ("auto", has):
        raise RuntimeError(f"the model was built for {device}, and this vLLM is for {has}")


def _cache_bytes(config: Any) -> int:
    """Return the size of four contexts, or of a quarter of each sequence that may be in flight."""
    model, parallel = config.model_config, config.parallel_config
    sequences = min(config.scheduler_config.max_num_seqs, _CACHED_SEQUENCES)
    contexts = max(_CACHED_CONTEXTS, sequences // 4)
    heads, size = model.get_num_kv_heads(parallel), model.get_head_size()
    number = _SIZES.get(str(model.dtype).removeprefix("torch."), 4)
    token = 2 * model.get_num_layers(parallel) * heads * size * number
    block = config.cache_config.block_size
    # A page of each context is not full.
    return int(contexts * (model.max_model_len + block) * token)


def _eos_ids(model_config: Any) -> frozenset[int]:
    """Return the ids of the tokens that end an answer; chat models have several."""
    eos = model_config.try_get_generation_config().get("eos_token_id")
    if eos is None:
        eos = getattr(model_config.hf_text_config, "eos_token_id", None)
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
