"""How much memory and disk a model takes on OpenVINO, while it is converted and served."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.plugin import ModelSize, Needs, Value, loaded_type

_PROCESS = 380_000_000
"""What Triton and a process of this engine take without a model (measured)."""
_CONVERTER, _OF_CONVERTER = 460_000_000, 8
"""What converting takes, whatever the size, and for each parameter (both measured)."""


def openvino_needs(size: ModelSize, options: Mapping[str, Value]) -> Needs:
    """Return what a model takes; one with a file that has a graph of it is copied."""
    if options["file"] or not size.is_checkpoint:
        return Needs(process=_PROCESS, weights=0 if options["file"] else size.bytes)
    is_int8 = options["weight_format"] == "int8"
    stored = (1 if is_int8 else 4) * size.parameters
    is_half = loaded_type(size, str(options["dtype"]), on_gpu=False) != "float32"
    # The products are copied into the form that the processor reads; the file stays mapped.
    weights = size.parameters * (1 if is_int8 else 2 if is_half else 4)
    return Needs(
        build=_CONVERTER + _OF_CONVERTER * size.parameters,
        reads=size.bytes,
        disk=stored,
        process=_PROCESS,
        weights=weights,
        mapped=stored,
        instead=() if is_int8 else ({"weight_format": "int8"},),
    )
