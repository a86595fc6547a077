"""The stand-in for ``platform: "pytorch_libtorch"``: TorchScript with the torch of PyPI."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.plugin import Model
from llmserve_standins.graphs import Array, Graph, ServedGraph


class TritonPythonModel(ServedGraph):
    default_file = "model.pt"

    def load(self, file: Path) -> Graph:
        import torch

        check_manifest(file, self.home)
        device = "cpu" if self.device is None else f"cuda:{self.device}"
        if self.device is not None and not torch.cuda.is_available():
            raise RuntimeError("this torch finds no GPU: build the model with --device cpu")
        jit: Any = torch.jit
        module = jit.load(str(file), map_location=device).eval()
        parameters = self.config.get("parameters") or {}
        unoptimized = (parameters.get("DISABLE_OPTIMIZED_EXECUTION") or {}).get("string_value")
        states = (self.config.get("sequence_batching") or {}).get("state") or []
        inputs = [tensor["name"] for tensor in self.config["input"]]
        outputs = [tensor["name"] for tensor in self.config["output"]]
        input_order = _by_index([*inputs, *(state["input_name"] for state in states)])
        output_order = _by_index([*outputs, *(state["output_name"] for state in states)])

        def run(feeds: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
            with torch.inference_mode(), jit.optimized_execution(unoptimized != "true"):
                results = module(
                    *(torch.from_numpy(feeds[name]).to(device) for name in input_order)
                )
            values = results if isinstance(results, tuple) else (results,)
            by_name = dict(zip(output_order, values, strict=False))
            return [by_name[name].cpu().numpy() for name in names]

        return Graph(f"torch {torch.__version__}", frozenset(input_order), run)


def check_manifest(path: Path, home: Path) -> None:
    """Refuse a file that llmserve has not built: TorchScript can run any code."""
    name = path.relative_to(home).as_posix()
    try:
        manifest = json.loads((home / "llmserve.json").read_text(encoding="utf-8"))
        expected = manifest["files"][name]
    except (OSError, ValueError, KeyError, TypeError):
        expected = None
    if Model(home).files.get(name, "") != expected:
        raise RuntimeError(
            f"{path.name} is not the file that llmserve built, and TorchScript can run any code: "
            "rebuild the model, or serve it in NVIDIA's container"
        )


def _by_index(names: Sequence[str]) -> list[str]:
    """Order tensors as libtorch's backend does: by ``name__index``, otherwise as configured."""
    indices = {name: name.partition("__")[2] for name in names}
    if all(index.isdigit() for index in indices.values()):
        return sorted(names, key=lambda name: int(indices[name]))
    return list(names)
