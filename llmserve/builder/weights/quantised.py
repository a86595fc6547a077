"""What a checkpoint of few bits is, as its configuration says; and who cannot compute it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

from llmserve.errors import ModelSourceError

Computes: TypeAlias = Literal["all", "transformers", "none"]
"""Which quantised checkpoints a generator computes: those of transformers need its packages."""

_WORDS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
}
_NEEDED = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "compressed-tensors": "compressed_tensors",
    "fp8": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "accelerate",
}
"""The module without which transformers does not load a checkpoint of a method."""


@dataclass(frozen=True)
class Quantised:
    """How the weights of a checkpoint were made smaller; 0 is what its configuration omits."""

    method: str
    bits: int = 0
    group: int = 0
    act_order: bool = False

    def __str__(self) -> str:
        parts = [_WORDS.get(self.method, repr(self.method))]
        parts += [f"{self.bits} bits"] if self.bits else []
        parts += [f"groups of {self.group}"] if self.group else []
        parts += ["act order"] if self.act_order else []
        return ", ".join(parts)


def quantised_by(config: Mapping[str, Any]) -> Quantised | None:
    """Return how the weights that a config.json describes are quantised; None if they are not."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(found, Mapping):
        return None
    method = found.get("quant_method")
    if method is None:
        is_4bit, is_8bit = found.get("load_in_4bit"), found.get("load_in_8bit")
        method = "bitsandbytes" if is_4bit or is_8bit else "unnamed"
    bits, group = found.get("bits"), found.get("group_size")
    return Quantised(
        method=str(method)[:64],
        bits=bits if type(bits) is int and bits > 0 else 0,
        group=group if type(group) is int and group > 0 else 0,
        act_order=found.get("desc_act") is True,
    )


def check_quantised(config: Mapping[str, Any], asked: str, computes: Computes) -> None:
    """Refuse a quantised checkpoint that would be loaded as something else, or not at all."""
    found = quantised_by(config)
    if found is None or computes == "all":
        return
    needed = _NEEDED.get(found.method)
    if computes == "transformers" and (needed is None or find_spec(needed)):
        return
    lacks = f", for which {needed} is not installed" if computes == "transformers" else ""
    raise ModelSourceError(
        f"{asked} is quantised ({found}), which this plugin does not compute{lacks}",
        hint="name the checkpoint in 16 bits that it was made from, or choose another plugin",
    )
