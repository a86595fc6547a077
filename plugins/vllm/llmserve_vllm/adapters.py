"""Adapters in vLLM's engine, which takes a name, a number and a folder for each."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from llmserve.runtime import (
    ADAPTERS,
    Lora,
    LoraError,
    LoraProducts,
    adapter_names,
    check_rank,
    read_lora,
)
from llmserve.runtime import lora_products as products_of
from llmserve_vllm import library
from llmserve_vllm.lora_limits import highest_rank, slots
from llmserve_vllm.translate import first_line

LOG = logging.getLogger(__name__)
# Each is in the budget of memory before vLLM gets it, so this is no limit.
_MOST = 10_000


def lora_arguments(version: Path, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``EngineArgs`` for adapters in a version folder, if it has any."""
    names = adapter_names(version)
    if not names:
        return {}
    return {
        "enable_lora": True,
        "max_loras": slots(chosen),
        "max_lora_rank": highest_rank([_rank(version, name) for name in names], chosen),
        "max_cpu_loras": _MOST,
    }


def _rank(version: Path, name: str) -> int:
    try:
        return read_lora(version / ADAPTERS / name).rank
    except LoraError as error:
        LOG.warning("llmserve: the adapter %s %s", name, error)
        return 0


class VllmAdapters:
    """Implements :class:`~llmserve.runtime.AdapterHome`, and checks what vLLM gets.

    vLLM takes weights of other shapes if they are smaller, and weights that are no numbers; and
    what it finds out in a step ends the step for all.
    """

    def __init__(
        self,
        engine: Callable[[], Any],
        highest_rank: int,
        location: str,
        options: Mapping[str, Any],
    ) -> None:
        self._engine, self._highest_rank = engine, highest_rank
        self._source = location, options
        self._numbers = itertools.count(1)
        self._requests: dict[str, Any] = {}

    @cached_property
    def _products(self) -> LoraProducts:
        return products_of(*self._source)

    def fits(self, lora: Lora) -> None:
        check_rank(lora, self._highest_rank)
        self._products.fits(lora)

    def size(self, lora: Lora) -> int:
        return self._products.size(lora)

    def load(self, key: str, lora: Lora) -> None:
        self._products.load(key, lora)
        self._products.unload(key)
        # What is computed with one is shared by its name: a key is of its content.
        request = library.LoRARequest(
            lora_name=key, lora_int_id=next(self._numbers), lora_path=str(lora.file.parent)
        )
        try:
            self._engine().add_lora(request)
        except Exception as error:
            LOG.warning("llmserve: vLLM refuses an adapter", exc_info=True)
            raise LoraError(f"is refused by vLLM: {first_line(error)}") from None
        self._requests[key] = request

    def unload(self, key: str) -> None:
        self._engine().remove_lora(self._requests.pop(key).lora_int_id)

    def request(self, key: str) -> Any:
        """Return what a request of an adapter that is loaded has for vLLM."""
        return self._requests[key]
