"""Adapters in the LLM API, which takes a name, a number and a folder for each."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from llmserve.errors import IncompatibleError
from llmserve.runtime import (
    ADAPTERS,
    Adapters,
    Lora,
    LoraError,
    ProductShapes,
    RequestError,
    adapter_names,
    check_lora,
    check_rank,
    located,
    lora_products,
    read_lora,
    read_lora_weights,
)

LOG = logging.getLogger(__name__)

_ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_dense"}
_MLP = {"gate_proj": "mlp_h_to_4h", "down_proj": "mlp_4h_to_h", "up_proj": "mlp_gate"}
_MODULES = {"llama": _ATTENTION | _MLP, "mistral": _ATTENTION}
"""TensorRT-LLM's names of the products that it adds to, by the type of the model.

The names are those of get_default_trtllm_modules_to_hf_modules in its lora_helper.py. It passes
lora_params to all of these in modeling_llama.py, to attention alone in modeling_mistral.py, and
before some release after 1.0 to nothing in modeling_qwen.py and modeling_qwen3.py: what an adapter
adds elsewhere is left out without a word.
"""
_LEAST_RANK = 16
_HALF_MAX = 65504.0
_FLOAT_MAX = 3.4028234663852886e38


def adapter_shapes(settings: Mapping[str, Any], folder: Path) -> ProductShapes:
    """Return the shapes of the products to which TensorRT-LLM adds what an adapter has for them."""
    from transformers import AutoConfig

    location, options = located(settings, folder)
    kind = str(AutoConfig.from_pretrained(location, **options).model_type)
    if kind not in _MODULES:
        raise IncompatibleError(
            f"TensorRT-LLM may leave out what adapters add to {kind} models: it is known to add "
            f"it to {' and '.join(_MODULES)} models",
            hint="merge the adapter into the model, or build with --plugin vllm",
        )
    shapes = lora_products(location, options).shapes
    return {name: shape for name, shape in shapes.items() if _last(name) in _MODULES[kind]}


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


class LlmApiAdapters:
    """Implements :class:`~llmserve.runtime.AdapterHome`, and checks what TensorRT-LLM gets.

    It would leave out products that it was not loaded for, and find out in a step, which it ends
    for all, what does not fit.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path, version: Path) -> None:
        self._settings, self._folder = settings, folder
        ranks = [_rank(version, name) for name in adapter_names(version)]
        self._highest_rank = settings["max_lora_rank"] or max([_LEAST_RANK, *ranks]) if ranks else 0
        self._numbers = itertools.count(1)
        self._requests: dict[str, Any] = {}

    @cached_property
    def _shapes(self) -> ProductShapes:
        return adapter_shapes(self._settings, self._folder)

    @cached_property
    def _place(self) -> int:
        """How many bytes an adapter takes at most."""
        return 2 * self._highest_rank * sum(map(sum, self._shapes.values()))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``LLM`` for the adapters that the model has, if it has any."""
        if not self._highest_rank:
            return {}
        names = _ATTENTION | _MLP
        most = max(1, self._settings["adapter_mb"] * 1_000_000 // self._place)
        config = _lora_config()(
            lora_target_modules=sorted({names[_last(name)] for name in self._shapes}),
            max_lora_rank=self._highest_rank,
            max_loras=min(self._settings["max_loras"], most),
            max_cpu_loras=most,
        )
        # With CUDA graphs, its answers with adapters are others (NVIDIA/TensorRT-LLM#5480); its
        # own tests of adapters leave them out as well.
        return {"lora_config": config, "cuda_graph_config": None}

    def fits(self, lora: Lora) -> None:
        check_rank(lora, self._highest_rank)
        check_lora(lora, self._shapes)

    def size(self, lora: Lora) -> int:
        # TensorRT-LLM counts places, each for the highest rank.
        del lora
        return self._place

    def load(self, key: str, lora: Lora) -> None:
        from tensorrt_llm.executor.request import LoRARequest

        is_wide = self._settings["dtype"] in ("bfloat16", "float32")
        for _ in read_lora_weights(lora, _FLOAT_MAX if is_wide else _HALF_MAX):
            pass
        if key not in self._requests:
            # TensorRT-LLM knows what it has read by the number, also in the cache of prompts.
            self._requests[key] = LoRARequest(key, next(self._numbers), str(lora.file.parent))

    def unload(self, key: str) -> None:
        """Keep its number: TensorRT-LLM reads it again if it has forgotten it itself."""

    def request(self, key: str) -> Any:
        """Return what a request of an adapter that is loaded has for the LLM API."""
        return self._requests[key]


def _rank(version: Path, name: str) -> int:
    try:
        return read_lora(version / ADAPTERS / name).rank
    except LoraError as error:
        LOG.warning("llmserve: the adapter %s %s", name, error)
        return 0


def _lora_config() -> Any:
    try:
        from tensorrt_llm.lora_manager import LoraConfig
    except ImportError:
        # After 1.3 it is elsewhere.
        from tensorrt_llm._torch.peft.lora.config import LoraConfig
    return LoraConfig


class AdapterQueue:
    """Lets requests wait in their threads until their adapters have places, in their order."""

    def __init__(self, home: LlmApiAdapters, version: Path, budget: int) -> None:
        self._home = home
        self._adapters = Adapters(version / ADAPTERS, home, budget)
        self._changed = threading.Condition()
        self._line: deque[object] = deque()
        self._holding = 0

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``LLM`` for adapters."""
        return self._home.arguments

    @contextmanager
    def held(self, names: Iterable[str]) -> Iterator[Mapping[str, Any]]:
        """Hold the adapters of these names, and yield what each has for the LLM API."""
        wanted = sorted({name for name in names if name})
        if not wanted:
            yield {}
            return
        ticket = object()
        with self._changed:
            keys = {name: self._adapters.find(name) for name in wanted}
            self._line.append(ticket)
            try:
                self._changed.wait_for(lambda: self._line[0] is ticket and self._hold(keys))
            finally:
                self._line.remove(ticket)
                self._changed.notify_all()
            found = {name: self._home.request(key) for name, key in keys.items()}
            self._holding += 1
        try:
            yield found
        finally:
            with self._changed:
                self._holding -= 1
                self._release(keys.values())
                self._changed.notify_all()

    def _hold(self, keys: Mapping[str, str]) -> bool:
        """Hold all or none, and return whether there was space."""
        held: list[str] = []
        try:
            for name, key in keys.items():
                if not self._adapters.hold(name, key):
                    break
                held.append(key)
            else:
                return True
        except BaseException:
            self._release(held)
            raise
        self._release(held)
        if not self._holding:
            raise RequestError(
                f"the request names {len(keys)} adapters, more than there is memory for: send "
                "several requests, or build with more --adapter-mb",
                code="conflicting_options",
                param="adapter",
            )
        return False

    def _release(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._adapters.release(key)
