"""How a model's rotary positions are stretched for a long context, from what a GGUF file says.

transformers reads the base of the rotation alone. Without the rest a model answers, but worse, and
with some models even to short prompts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from llmserve.builder.gguf.header import GgufHeader

_F32 = 0
# Those of every Llama 3.1 to 3.3; the file has the divisors alone.
_LLAMA3: dict[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_TOLERANCE = 1e-3


def rope_parameters(header: GgufHeader) -> dict[str, Any] | None:
    """Return transformers' parameters; None if nothing is stretched, empty if it is unknown how."""
    if divisors := _numbers(header, "rope_freqs.weight"):
        return _llama3(divisors, float(header.own("rope.freq_base") or 10_000.0))
    kind, factor = header.own("rope.scaling.type"), header.own("rope.scaling.factor")
    original = header.own("rope.scaling.original_context_length")
    if short := _numbers(header, "rope_factors_short.weight"):
        long = _numbers(header, "rope_factors_long.weight")
        context = header.own("context_length")
        if not (original and long and context):
            return {}
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "factor": context / original,
            "original_max_position_embeddings": original,
        }
    if kind in (None, "none") or factor in (None, 0, 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and original:
        return {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original
        }  # fmt: skip
    return {}


def _llama3(divisors: Sequence[float], base: float) -> dict[str, Any]:
    """Return the parameters if they give these divisors."""
    # Written with the precision of 32 bits.
    factor = round(max(divisors), 3)
    if factor <= 1:
        return {}
    expected = llama3_divisors(len(divisors), base, factor, **_LLAMA3)
    close = all(
        math.isclose(one, other, rel_tol=_TOLERANCE)
        for one, other in zip(divisors, expected, strict=True)
    )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3} if close else {}


def llama3_divisors(
    count: int,
    base: float,
    factor: float,
    *,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> list[float]:
    """Return by what each frequency is divided: by nothing where it is high, between them a mix."""
    divisors = []
    for index in range(count):
        turns = original_max_position_embeddings / (2 * math.pi * base ** (index / count))
        share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        share = min(max(share, 0.0), 1.0)
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors


def _numbers(header: GgufHeader, name: str) -> list[float]:
    """Return a small tensor of 32-bit numbers, empty if the file does not have it."""
    tensor = header.tensor(name)
    if tensor is None or tensor.kind != _F32 or len(tensor.shape) != 1:
        return []
    with header.path.open("rb") as file:
        file.seek(header.data + tensor.offset)
        return list(struct.unpack(f"<{tensor.elements}f", file.read(4 * tensor.elements)))
