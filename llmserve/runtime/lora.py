"""LoRA adapters as PEFT saves them: small additions to a model's products, which requests name.

An adapter is a folder with ``adapter_config.json`` and ``adapter_model.safetensors``. It is data:
nothing in it is run, and everything in it is checked before it is used.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTERS = "adapters"
"""Where a model's version folder has its adapters, each in a folder of its name."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_RANK = 512
DEFAULT_ADAPTER_MB = 1024
"""How many megabytes of adapters a model has in memory, unless its build says otherwise."""
_MAX_CONFIG, _MAX_TENSORS = 1 << 20, 20_000
_KEY = re.compile(r"base_model\.model\.([A-Za-z0-9_.]{1,256})\.lora_([AB])\.weight")
_ZEROS: tuple[object, ...] = (None, False, 0, "", [], {})
# What adds more than a product of two small matrices, and what is given by patterns.
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules",
    "lora_bias": "biases",
    "rank_pattern": "ranks by patterns",
    "alpha_pattern": "scales by patterns",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "parameters that are no modules",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activation by tokens",
}


class LoraError(ValueError):
    """An adapter that cannot be used; the message continues "the adapter NAME …"."""


@dataclass(frozen=True)
class Lora:
    """An adapter on the disk, checked as far as that goes without the model.

    ``shapes`` has the numbers of inputs and of outputs of each module that it adds to.
    """

    file: Path
    rank: int
    scale: float
    shapes: Mapping[str, tuple[int, int]]
    base: str
    """The model that it was trained on, as its file says."""


def is_adapter_name(name: str) -> bool:
    """Return whether an adapter can be called so; no path is."""
    return _NAME.fullmatch(name) is not None


def adapter_names(version: Path) -> list[str]:
    """Return the names of the adapters in a model's version folder."""
    names = (path.name for path in version.glob(f"{ADAPTERS}/*"))
    return sorted(filter(is_adapter_name, names))


def read_lora(folder: Path) -> Lora:
    """Return the adapter in a folder; raise :class:`LoraError` if it is none that is supported."""
    config = _config(folder / CONFIG)
    rank = config.get("r")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise LoraError(
            f"has the rank {str(rank)[:40]}, and ranks from 1 to {MAX_RANK} are supported"
        )
    alpha = config.get("lora_alpha", rank)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not _is_finite(alpha):
        raise LoraError(f"has a lora_alpha that is no number: {str(alpha)[:40]!r}")
    file = folder / WEIGHTS
    if not file.is_file():
        others = [*folder.glob("adapter_model.*")]
        hint = f", only {others[0].name}: save it as safetensors" if others else ""
        raise LoraError(f"has no {WEIGHTS}{hint}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Lora(file, rank, scale, _shapes(file, rank), str(config.get("base_model_name_or_path")))


def check_rank(lora: Lora, highest: int) -> None:
    """Raise :class:`LoraError` if an engine has no room for it; 0 is one without adapters."""
    if not highest:
        raise LoraError("came after the model was loaded without any: load the model again")
    if lora.rank > highest:
        raise LoraError(
            f"has the rank {lora.rank}, and the model was loaded for ranks up to {highest}: "
            "load it again"
        )


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        # An integer of JSON has any number of digits.
        return False


def adapters_of(version: Path) -> dict[str, Lora | LoraError]:
    """Return the adapters of a model by name, or what is wrong with one."""
    found: dict[str, Lora | LoraError] = {}
    for name in adapter_names(version):
        try:
            found[name] = read_lora(version / ADAPTERS / name)
        except LoraError as error:
            found[name] = error
    return found


def _config(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG:
            raise LoraError(f"has a {CONFIG} of more than a megabyte")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, LoraError):
            raise
        raise LoraError(f"has no {CONFIG} that can be read") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise LoraError(f"is of PEFT's type {_quoted(config)}, and only LORA is supported")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise LoraError(f"is for {str(config['task_type'])[:40]!r}, not for CAUSAL_LM")
    if config.get("bias", "none") != "none":
        raise LoraError("has biases, which are not supported")
    for key, words in _REFUSED.items():
        if config.get(key) not in _ZEROS:
            raise LoraError(f"has {words} ({key}), which are not supported")
    return config


def _quoted(config: object) -> str:
    kind = config.get("peft_type") if isinstance(config, dict) else None
    return repr(str(kind)[:40])


def _shapes(file: Path, rank: int) -> dict[str, tuple[int, int]]:
    from safetensors import SafetensorError, safe_open

    found: dict[str, dict[str, tuple[int, ...]]] = {}
    try:
        with safe_open(file, "np") as stored:
            names = list(stored.keys())
            if len(names) > _MAX_TENSORS:
                raise LoraError(f"has {len(names)} weights, and {_MAX_TENSORS} are the most")
            for name in names:
                if (key := _KEY.fullmatch(name)) is None:
                    raise LoraError(
                        f"has the weight {name[:80]!r}, which is none of LoRA's products"
                    )
                found.setdefault(key[1], {})[key[2]] = tuple(stored.get_slice(name).get_shape())
    except (OSError, SafetensorError):
        raise LoraError(f"has a damaged {WEIGHTS}") from None
    shapes = {}
    for module, pair in found.items():
        first, second = pair.get("A", ()), pair.get("B", ())
        if len(first) != 2 or len(second) != 2 or first[0] != rank or second[1] != rank:
            raise LoraError(
                f"has weights of {module} that do not fit each other or its rank {rank}"
            )
        shapes[module] = first[1], second[0]
    if not shapes:
        raise LoraError("has no weights")
    return shapes
