"""The stand-in for ``platform: "pytorch_libtorch"``: TorchScript with the torch of PyPI."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from llmserve.plugin import Model
from llmserve_standins.graphs import (
    Array,
    Graph,
    ServedGraph,
    check_input_count,
    sequence_inputs,
)


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
        arguments = _arguments(module)
        check_input_count(self.config, len(arguments))
        inputs = _input_places(self.config, arguments)
        outputs = _output_places(self.config)
        input_order = sorted(inputs, key=inputs.__getitem__)

        def run(feeds: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
            with torch.inference_mode(), jit.optimized_execution(unoptimized != "true"):
                results = module(
                    *(torch.from_numpy(feeds[name]).to(device) for name in input_order)
                )
            values = results if isinstance(results, tuple) else (results,)
            if absent := [name for name in names if outputs[name] >= len(values)]:
                raise RuntimeError(
                    f"the output {absent[0]} of the configuration has the index "
                    f"{outputs[absent[0]]}, and the graph has {len(values)} outputs"
                )
            return [values[outputs[name]].cpu().numpy() for name in names]

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


def _arguments(module: Any) -> list[str]:
    """Return the names of what ``forward`` reads."""
    arguments = [a for a in module.forward.schema.arguments if a.type.kind() != "ClassType"]
    if other := [a.name for a in arguments if a.type.kind() != "TensorType"]:
        raise RuntimeError(
            f"llmserve's stand-in passes only tensors, and {other[0]} is of another type: use "
            "NVIDIA's container"
        )
    return [argument.name for argument in arguments]


def _input_places(config: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, int]:
    """Return the place of each input among the arguments, found as libtorch's backend does."""
    names = [tensor["name"] for tensor in config["input"]]
    controls, states = sequence_inputs(config)
    if set(names) <= set(arguments):
        if states:
            _refuse_state(config)
        places = {name: arguments.index(name) for name in names}
    else:
        places = _places(config, names, states)
    places.update({name: _required_index(config, name) for name in controls})
    if sorted(places.values()) != list(range(len(arguments))):
        raise RuntimeError(
            f"the inputs of {config['name']} have the places {sorted(places.values())}, and the "
            f"graph reads {len(arguments)}, counted from 0: number them name__0, name__1 and so on"
        )
    return places


def _output_places(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the place of each output; whether the graph has it is seen when it runs."""
    names = [tensor["name"] for tensor in config["output"]]
    states = (config.get("sequence_batching") or {}).get("state") or []
    return _places(config, names, [state["output_name"] for state in states])


def _places(
    config: Mapping[str, Any], names: Sequence[str], states: Sequence[str]
) -> dict[str, int]:
    """Order tensors by ``name__index``, otherwise as configured, which states do not allow."""
    indices = [_index(name) for name in names]
    if None in indices:
        if states:
            _refuse_state(config)
        return {name: place for place, name in enumerate(names)}
    places = {name: index for name, index in zip(names, indices, strict=True) if index is not None}
    return {**places, **{name: _required_index(config, name) for name in states}}


def _index(name: str) -> int | None:
    index = name.partition("__")[2]
    return int(index) if index.isdigit() else None


def _required_index(config: Mapping[str, Any], name: str) -> int:
    index = _index(name)
    if index is None:
        raise RuntimeError(
            f"{name} of {config['name']} is a state or a control, so its name has to end with its "
            "place among the graph's inputs or outputs: name__index"
        )
    return index


def _refuse_state(config: Mapping[str, Any]) -> NoReturn:
    raise RuntimeError(
        f"{config['name']} has states, so all of its inputs and outputs have to be named "
        "name__index, and no input as an argument of the graph"
    )
