"""The stand-in for ``platform: "pytorch_libtorch"``: TorchScript with the torch of PyPI."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.repository.manifest import hashes
from llmserve_standins.graphs import Array, Graph, ServedGraph


class TritonPythonModel(ServedGraph):
    usual_file = "model.pt"

    def load(self, file: Path) -> Graph:
        import torch

        check_built_here(file, self.home)
        device = "cpu" if self.device is None else f"cuda:{self.device}"
        if self.device is not None and not torch.cuda.is_available():
            raise RuntimeError("this torch finds no GPU: build the model with --device cpu")
        jit: Any = torch.jit
        module = jit.load(str(file), map_location=device).eval()
        parameters = self.config.get("parameters") or {}
        switch = (parameters.get("DISABLE_OPTIMIZED_EXECUTION") or {}).get("string_value")
        states = (self.config.get("sequence_batching") or {}).get("state") or []
        inputs = [tensor["name"] for tensor in self.config["input"]]
        outputs = [tensor["name"] for tensor in self.config["output"]]
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
    name = path.relative_to(home).as_posix()
    try:
        manifest = json.loads((home / "llmserve.json").read_text(encoding="utf-8"))
        expected = manifest["files"][name]
    except (OSError, ValueError, KeyError, TypeError):
        expected = None
    if hashes(home).get(name, "") != expected:
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
