"""A model in OpenVINO's form with its pooling, as one function of padded ids."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.graphs import openvino as ov
from llmserve.runtime import contract
from llmserve_embed.inputs import INPUTS

LOG = logging.getLogger(__name__)
MODEL = "openvino_model.xml"
_CAPABILITIES = {"bf16": "BF16", "f16": "FP16"}


class OpenVinoNetwork:
    """Runs a model on the CPU; without a ``pooling`` its output are the values themselves."""

    pass_cost = 16

    def __init__(
        self, path: Path, pooling: str | None, padding: int, properties: Mapping[str, Any]
    ) -> None:
        self.padding = padding
        self._model = compiled(values_of(read(path), pooling), properties)
        self._types = {port.any_name: port.element_type.to_dtype() for port in self._model.inputs}
        self.streams: int = self._model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        self._idle: SimpleQueue[Any] = SimpleQueue()
        for _ in range(self.streams):
            self._idle.put(self._model.create_infer_request())

    def __call__(
        self, ids: npt.NDArray[Any], mask: npt.NDArray[Any], segments: npt.NDArray[Any]
    ) -> npt.NDArray[np.float32]:
        named = zip(INPUTS, (ids, mask, segments), strict=True)
        inputs = {name: rows for name, rows in named if name in self._types}
        typed = {name: rows.astype(self._types[name], copy=False) for name, rows in inputs.items()}
        request = self._idle.get()
        try:
            # Other Python threads can run meanwhile.
            request.infer(typed, share_inputs=True)
            # The next pass writes to the same memory.
            values: npt.NDArray[np.float32] = request.get_output_tensor(0).data.copy()
        except Exception:
            # One that failed may be left in any state.
            request = self._model.create_infer_request()
            raise
        finally:
            self._idle.put(request)
        return values


def properties(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return how OpenVINO is to compute, on the machine that serves the model."""
    found: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": _precision(
            settings["precision"], half=settings["half_weights"]
        ),
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": settings["dynamic_quantization"],
    }
    if streams := settings["streams"]:
        found["NUM_STREAMS"] = streams
    # OpenVINO has its own threads, and ignores OpenMP's variables for their number.
    if threads := settings["threads"] or int(os.environ.get(contract.THREADS, 0)):
        found["INFERENCE_NUM_THREADS"] = threads
    return found


def _precision(name: str, *, half: bool) -> str:
    """Return the type to compute in, chosen on the machine that serves the model."""
    supported = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if name == "auto":
        # A checkpoint in float32 keeps its precision.
        return "bf16" if half and "BF16" in supported else "f32"
    if _CAPABILITIES.get(name, "FP32") not in supported:
        LOG.warning(
            "llmserve: note: %s was asked for, and this processor has no instructions for it: "
            "expect float32's speed at best. Build with --dtype auto or --dtype float32.",
            name,
        )
    return name


def compiled(model: Any, properties: Mapping[str, Any]) -> Any:
    options = {"PERFORMANCE_HINT": "THROUGHPUT", **properties}
    return ov.Core().compile_model(model, "CPU", options)


def read(path: Path) -> Any:
    """Read a model; what is none raises a ValueError."""
    try:
        return ov.Core().read_model(str(path))
    except RuntimeError as error:
        raise ValueError(str(error).strip().splitlines()[-1]) from None


def values_of(model: Any, pooling: str | None) -> Any:
    """Return the model with one output, the values of each row: pooled, or the logits.

    A model that is not for this raises a ValueError.
    """
    ops = ov.opset13
    names = {port.any_name: port for port in model.inputs}
    if unknown := sorted(names.keys() - {*INPUTS}):
        raise ValueError(f"it reads {', '.join(unknown)}")
    if missing := sorted({*INPUTS[:2]} - names.keys()):
        raise ValueError(f"it does not read {' and '.join(missing)}")
    fitting = _logits(model) if pooling is None else _of_rank(model, 3)
    if not fitting:
        what = "logits" if pooling is None else "vectors of tokens"
        raise ValueError(f"it has no output of {what}")
    values = fitting[0].get_node().input_value(0)
    if pooling is not None:
        mask = names["attention_mask"].get_node().output(0)
        values = _POOLINGS[pooling](ops, values, ops.convert(mask, "i64"))
    inputs = [port.get_node() for port in model.inputs]
    return ov.Model([ops.result(values)], inputs, "values")


def _of_rank(model: Any, rank: int) -> list[Any]:
    return [port for port in model.outputs if port.partial_shape.rank == rank]


def _logits(model: Any) -> list[Any]:
    fitting = _of_rank(model, 2)
    if named := [port for port in fitting if "logits" in port.names]:
        return named
    # What gives vectors of tokens has no head: the other output is a pooled vector of the text.
    return [] if _of_rank(model, 3) else fitting


def _constant(ops: Any, *values: int) -> Any:
    return ops.constant(np.array(values, dtype=np.int64))


def _mean(ops: Any, states: Any, mask: Any) -> Any:
    weights = ops.unsqueeze(ops.convert(mask, "f32"), _constant(ops, 2))
    axis = _constant(ops, 1)
    total = ops.reduce_sum(ops.multiply(states, weights), axis)
    return ops.divide(total, ops.reduce_sum(weights, axis))


def _first(ops: Any, states: Any, mask: Any) -> Any:
    del mask
    return ops.gather(states, ops.constant(np.int64(0)), ops.constant(np.int64(1)))


def _last(ops: Any, states: Any, mask: Any) -> Any:
    lengths = ops.reduce_sum(mask, _constant(ops, 1), keep_dims=True)
    last = ops.subtract(lengths, _constant(ops, 1))
    row = ops.gather(states, last, ops.constant(np.int64(1)), batch_dims=1)
    return ops.squeeze(row, _constant(ops, 1))


def _largest(ops: Any, states: Any, mask: Any) -> Any:
    counted = ops.unsqueeze(ops.convert(mask, "boolean"), _constant(ops, 2))
    lowest = ops.constant(np.float32(np.finfo(np.float32).min))
    return ops.reduce_max(ops.select(counted, states, lowest), _constant(ops, 1))


_POOLINGS = {"mean": _mean, "cls": _first, "last": _last, "max": _largest}
