"""The stand-in for ``platform: "pytorch_libtorch"``: TorchScript with the torch of PyPI."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve_standins.graphs import Array, Graph, Place, ServedGraph


def load(place: Place) -> Graph:
    import torch

    path = place.file("model.pt")
    check_built_here(path, place.home)
    device = "cpu" if place.device is None else f"cuda:{place.device}"
    if place.device is not None and not torch.cuda.is_available():
        raise RuntimeError("this torch finds no GPU: build the model with --device cpu")
    jit: Any = torch.jit
    module = jit.load(str(path), map_location=device).eval()
    parameters = place.config.get("parameters") or {}
    switch = (parameters.get("DISABLE_OPTIMIZED_EXECUTION") or {}).get("string_value")
    states = (place.config.get("sequence_batching") or {}).get("state") or []
    inputs = [tensor["name"] for tensor in place.config["input"]]
    outputs = [tensor["name"] for tensor in place.config["output"]]
    order = _by_index([*inputs, *(state["input_name"] for state in states)])
    results = _by_index([*outputs, *(state["output_name"] for state in states)])

    def run(feeds: Mapping[str, Array], wanted: Sequence[str]) -> list[Array]:
        with torch.inference_mode(), jit.optimized_execution(switch != "true"):
            found = module(*(torch.from_numpy(feeds[name]).to(device) for name in order))
        values = found if isinstance(found, tuple) else (found,)
        by_name = dict(zip(results, values, strict=False))
        return [by_name[name].cpu().numpy() for name in wanted]

    return Graph(f"torch {torch.__version__}", frozenset(order), run)


def check_built_here(path: Path, home: Path) -> None:
    """Refuse a file that llmserve has not built: TorchScript can run any code."""
    try:
        manifest = json.loads((home / "llmserve.json").read_text(encoding="utf-8"))
        expected = manifest["files"][path.relative_to(home).as_posix()]
    except (OSError, ValueError, KeyError, TypeError):
        expected = None
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise RuntimeError(
            f"{path.name} is not what llmserve built, and TorchScript can run any code: build the "
            "model again, or serve it in NVIDIA's container"
        )


def _by_index(names: Sequence[str]) -> list[str]:
    """Order tensors as libtorch's backend does: by ``name__index``, else as configured."""
    ends = {name: name.partition("__")[2] for name in names}
    if all(end.isdigit() for end in ends.values()):
        return sorted(names, key=lambda name: int(ends[name]))
    return list(names)


class TritonPythonModel(ServedGraph):
    def load(self, place: Place) -> Graph:
        return load(place)
