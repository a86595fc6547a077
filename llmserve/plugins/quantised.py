"""How the weights of a checkpoint were made smaller, and who computes them as they are."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, TypeAlias

from llmserve.hardware import has_gpu

METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
}
"""What the methods that checkpoints name are called."""
_USUAL = ("", "gptq", "gemm")
"""Forms that go without saying."""
_NEEDED = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "compressed-tensors": "compressed_tensors",
    "fp8": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "accelerate",
}
"""The module without which transformers does not load a checkpoint of a method."""
_ONLY_ON_GPUS = ("fp8", "mxfp4")
"""Methods whose weights transformers widens where there is no GPU."""

Treatment: TypeAlias = Literal["", "kept", "widened"]
"""What a generator does with such weights: refuse them, keep their bits, or widen them to 16."""


@dataclass(frozen=True)
class Quantised:
    """How the weights of a checkpoint were made smaller; what its configuration omits is empty.

    ``form`` is how its method stores them, where there are several ways: ``pack-quantized`` of
    compressed-tensors, ``gemm`` of AWQ, ``gptq_v2`` of GPTQ.
    """

    method: str
    bits: int = 0
    group: int = 0
    """How many weights share a scale; 0 if that is not said, or if all of a row do."""
    act_order: bool = False
    """Whether weights that share a scale are beside each other only in another order."""
    form: str = ""
    block: tuple[int, int] = (0, 0)
    """How many outputs and inputs share a scale, where it is not a part of one output."""

    def __str__(self) -> str:
        parts = [METHODS.get(self.method, repr(self.method))]
        parts += [self.form] if self.form not in _USUAL else []
        parts += [f"{self.bits} bits"] if self.bits else []
        parts += [f"groups of {self.group}"] if self.group else []
        parts += ["blocks of {} x {}".format(*self.block)] if all(self.block) else []
        parts += ["act order"] if self.act_order else []
        return ", ".join(parts)


def by_transformers(found: Quantised) -> Treatment:
    """Return what transformers does with such a checkpoint, with the packages that are here."""
    needed = _NEEDED.get(found.method)
    if needed is None or find_spec(needed) is None:
        return ""
    return "widened" if found.method in _ONLY_ON_GPUS and not has_gpu() else "kept"
