"""How much memory and disk a model takes on OpenVINO, while it is converted and served."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.plugin import ModelSize, Needs, Value, loaded_type

_PROCESS = 380_000_000
"""What Triton and a process of this engine take without a model (measured)."""
_CONVERTER, _PART = 570_000_000, 300_000_000
"""What converting takes, whatever the size, and what comparing a few layers adds (measured)."""
_WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}


def openvino_needs(size: ModelSize, options: Mapping[str, Value]) -> Needs:
    """Return what a model takes; one with a file that has a graph of it is copied."""
    if options["file"] or not size.is_checkpoint:
        return Needs(process=_PROCESS, weights=0 if options["file"] else size.bytes)
    chosen = str(options["weight_format"])
    is_int8 = chosen == "int8"
    width = _WIDTHS.get(chosen, 4 if size.dtype == "float32" else 2)
    stored = width * size.parameters
    is_half = loaded_type(size, str(options["dtype"]), on_gpu=False) != "float32"
    # The products are copied into the form that the processor reads; the file stays mapped.
    weights = size.parameters * (1 if is_int8 else 2 if is_half else 4)
    return Needs(
        # The largest weight is in memory in 8 bits before it is written.
        build=_CONVERTER + min(size.parameters, _PART) + (size.largest if is_int8 else 0),
        reads=size.bytes + stored,
        # A format that is not the checkpoint's is written to a file of its own first.
        disk=stored if chosen == "auto" else 2 * stored,
        process=_PROCESS,
        weights=weights,
        mapped=stored,
        instead=() if is_int8 else ({"weight_format": "int8"},),
    )
