"""How many adapters vLLM has a place for at once, and of which rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The highest ranks that vLLM can be told (0.32.0)."""
_RANK, _SLOTS = 16, 8


def highest_rank(ranks: Iterable[int], arguments: Mapping[str, Any]) -> int:
    """Return the rank that places are for, if adapters of these ranks are there."""
    rank = arguments.get("max_lora_rank") or max(_RANK, *ranks)
    return next(allowed for allowed in RANKS if allowed >= rank)


def slots(arguments: Mapping[str, Any]) -> int:
    """Return how many places there are: vLLM takes the memory of all of them at once."""
    return int(arguments.get("max_loras", _SLOTS))
