"""Compares the names and shapes of stored weights with the model that transformers would load.

transformers loads tensors without values into a model without values, so that its own renames,
joins and ties count, and a model of any size takes no more memory than its names.

It runs as a separate program: what torch and transformers take is freed when it ends.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# As safetensors calls them; all others count as bytes, because only shapes are compared.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUMBER = re.compile(r"\d+")


def compare(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of weights that are missing, and those of other shapes.

    ``unchecked`` is why nothing could be compared, ``misfit`` why the weights cannot be loaded, and
    ``unknown`` is there if transformers does not know this kind of model.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity(50)
    nan: list[str] = []
    state = {
        name: torch.empty(shape, dtype=getattr(torch, _DTYPES.get(kind, "uint8")), device="meta")
        for name, (kind, shape) in asked["tensors"].items()
    }
    for file, _ in asked["pickled"]:
        for name, tensor in _unpickled(file).items():
            if tensor.is_floating_point() and tensor.numel() and bool(tensor.isnan().all()):
                nan.append(name)
            state[name] = torch.empty_like(tensor, device="meta")
    try:
        config = _config(transformers, asked)
    except KeyError:
        return {"nan": nan, "unknown": transformers.__version__}
    except Exception as error:
        return {"nan": nan, "unchecked": _first_line(error)}
    quantized = _without_quantization(config)
    try:
        with torch.device("meta"):
            made = getattr(transformers, asked["loader"]).from_config(
                config, trust_remote_code=asked["trusted"]
            )
    except Exception as error:
        return {"nan": nan, "unchecked": _first_line(error)}
    try:
        _, info = type(made).from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        kind = "unchecked" if quantized else "misfit"
        return {"nan": nan, kind: _first_line(error)}
    except Exception as error:
        return {"nan": nan, "unchecked": _first_line(error)}
    missing = set(map(str, info["missing_keys"]))
    missing -= _set_by_code(made, missing)
    mismatched = [tuple(each) for each in info["mismatched_keys"]]
    if quantized:
        # Beside its scales, a weight has another name and shape.
        names = state.keys() | set(map(str, info["unexpected_keys"]))
        parents = {parent for name in names for parent in _parents(name)}
        missing = {name for name in missing if name.rpartition(".")[0] not in parents}
        mismatched = []
    return {
        "nan": nan,
        "missing": sorted(missing),
        "mismatched": sorted((name, [*found], [*wanted]) for name, found, wanted in mismatched),
    }


def _config(transformers: Any, asked: Mapping[str, Any]) -> Any:
    """Return the configuration; raise a KeyError if its ``model_type`` is not known."""
    content = json.loads(asked["config"])
    options = {"trust_remote_code": asked["trusted"], "local_files_only": True}
    if asked["trusted"] and "AutoConfig" in (content.get("auto_map") or {}):
        return transformers.AutoConfig.from_pretrained(asked["folder"], **options)
    if content.get("model_type") not in transformers.CONFIG_MAPPING:
        raise KeyError
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(asked["config"], encoding="utf-8")
        return transformers.AutoConfig.from_pretrained(folder, **options)


def _without_quantization(config: Any) -> bool:
    """Describe the model as if its weights were plain, and return whether they are not.

    A quantized model's layers can be made only with the packages that compute them.
    """
    found = False
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
            found = True
    return found


def _set_by_code(model: Any, missing: set[str]) -> set[str]:
    """Return missing buffers that no layer has: they are newer than the checkpoint.

    They begin as the model's code sets them. A buffer that another layer has was stored, and lost.
    """
    buffers = {name for name, _ in model.named_buffers()}
    alike: dict[str, set[str]] = {}
    for name in buffers:
        alike.setdefault(_NUMBER.sub("#", name), set()).add(name)
    return {name for group in alike.values() if group <= missing for name in group}


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _unpickled(file: str) -> Mapping[str, Any]:
    import torch

    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError):
        # Files of before torch 1.6 cannot be mapped.
        content = torch.load(file, map_location="cpu", weights_only=True)
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    answer = compare(json.loads(sys.stdin.read()))
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")
