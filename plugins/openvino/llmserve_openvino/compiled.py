"""A graph as compiled for a number of threads, with what its next pass is given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

from llmserve.graphs import openvino as ov
from llmserve_openvino.embedded_rows import input_widths
from llmserve_openvino.lora import OWN, OpenVinoProducts
from llmserve_openvino.state_tables import zeros

THREADS = "INFERENCE_NUM_THREADS"


class Compiled:
    """A compiled model and its request, which reads and writes the tensors in ``kept``."""

    def __init__(self, model: Any, targets: frozenset[str]) -> None:
        self.model = model
        self.targets = targets
        """The modules that adapters can add to."""
        self.is_packed = False
        """Whether the weights are in the form that the processor reads: after the first pass."""
        self.inputs = {port.any_name for port in model.inputs}
        self.widths = input_widths(model)
        """Those of what stands for images, if it takes any."""
        self._kept: Mapping[str, Any] = {}
        self._passed: tuple[int, int, int] | None = None
        """The change of the adapters, and the columns, of which the matrices are set."""

    @property
    def threads(self) -> int:
        return int(self.model.get_property(THREADS))

    def attach(self, kept: Mapping[str, Any]) -> None:
        """Have passes read and write these tensors, in a new request."""
        self._kept = kept
        self._tensors: dict[str, Any] = {}
        self._passed = None
        self._request = self.model.create_infer_request()
        for name, tensor in kept.items():
            self._request.set_tensor(name, tensor)

    def give(self, name: str, values: Any) -> None:
        """Give an input. A tensor of the same shape is filled again: in a short pass of a small
        model, making and setting new ones is a noticeable part."""
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.data.shape == values.shape:
            tensor.data[...] = values
            return
        self._tensors[name] = ov.Tensor(values)
        self._request.set_tensor(name, self._tensors[name])

    def give_adapters(self, adapters: OpenVinoProducts, keys: Sequence[str]) -> None:
        """Give whose columns are whose, and the matrices if the rows need others than before."""
        columns, own = adapters.columns.of_rows(keys)
        self.give(OWN, own)
        state = adapters.changes, columns.start, columns.stop
        if state != self._passed:
            # OpenVINO reads them where they are.
            self._matrices = {**adapters.stacks}
            for name, tensor in adapters.inputs(columns).items():
                self._request.set_tensor(name, tensor)
            self._passed = state

    def infer(self) -> Any:
        """Compute a pass; return the scores, which are valid until the next."""
        try:
            # Other Python threads can run meanwhile. The scores are not copied: of 32 sequences and
            # a large vocabulary they are megabytes.
            self._request.infer(share_outputs=True)
        except Exception:
            # A request that failed may be left in any state; the pages are not part of it.
            self.attach(self._kept)
            raise
        return self._request.get_tensor("logits").data

    def pack(self, inputs: Mapping[str, Any], kept: Collection[str]) -> None:
        """Run a first pass of one token, with tensors of two rows for ``kept`` that are let go."""
        request = self.model.create_infer_request()
        # The tensors refer to the memory and do not own it.
        held = []
        for port in self.model.inputs:
            values = inputs.get(name := port.any_name)
            if values is not None:
                request.set_tensor(name, ov.Tensor(values))
                continue
            rows = 2 if name in kept else 1
            axes = [axis.get_length() if axis.is_static else rows for axis in port.partial_shape]
            held.append(memory := zeros(prod(axes) * port.element_type.size))
            request.set_tensor(name, ov.Tensor(memory, ov.Shape(axes), port.element_type))
        request.infer()
        self.is_packed = True
