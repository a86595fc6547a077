"""What is done here because OpenVINO and PyTorch have no public name for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmserve.graphs import openvino as ov

_READERS = {"MatMul", "Gather"}
"""What reads the weights that are large: products, and the table of tokens."""
_PRECISIONS = {ov.Type.f32: "FP32", ov.Type.i32: "I32"}


def use_paged_attention(model: Any) -> None:
    """Replace a model's attention and its state, in place, by attention that reads pages.

    OpenVINO's C++ library has the pass under a public name (``ov::pass::SDPAToPagedAttention``),
    its Python package only under a private one: seen in 2026.4.1. Once ``openvino.passes``
    has it, ``test_openvino_workarounds.py`` fails, and this can go.
    """
    from openvino._offline_transformations import paged_attention_transformation

    paged_attention_transformation(model)


def keep_halves(model: Any) -> None:
    """Have weights in float16 stay in 16 bits in memory.

    A CPU's transformations widen them as constants (2.5 to 3.6 times the memory), unless the
    operation that converts each is marked as what undoes a compression. OpenVINO marks those that
    it stores itself; Python has no function for it, and files of others may lack the mark: seen in
    2026.4.1. ``test_openvino_workarounds.py`` measures a model without, and fails once this can go.
    """
    for operation in model.get_ops():
        if operation.get_type_name() != "Convert":
            continue
        stored, readers = operation.input_value(0), operation.output(0).get_target_inputs()
        if (
            stored.get_node().get_type_name() == "Constant"
            and stored.get_element_type() == ov.Type.f16
            and {reader.get_node().get_type_name() for reader in readers} <= _READERS
        ):
            operation.get_rt_info()["decompression_0"] = True


def forget_traces() -> None:
    """Free what PyTorch keeps of modules that have been traced, and that are gone.

    It keeps the class and the code of each (``torch.jit``), 12 MB of a layer of Llama's, and has
    only private names to be rid of them: seen in 2.13.0. ``test_openvino_workarounds.py`` fails
    once this can go.
    """
    import torch  # A server's process does without it.

    torch._C._jit_clear_class_registry()
    torch.jit._state._clear_class_state()


def read_model(path: str) -> Any:
    """Read a model from its file, with the operations that only the plugin for CPUs knows.

    Until that plugin is loaded, its internal operations are unknown to whoever reads a file: seen
    in 2026.4.1. ``test_openvino_workarounds.py`` fails once this can go.
    """
    return _with_internal_operations().read_model(path)


def internal_operation(
    kind: str, inputs: Sequence[Any], *, like: int, **attributes: str
) -> list[Any]:
    """Return the result of an operation that Python has no name for, shaped like an input of it.

    The operations on tables of states are internal to OpenVINO (``ov::op::internal``), which reads
    them from files: seen in 2026.4.1. ``test_openvino_workarounds.py`` fails once Python has them.
    """
    ports = [_port(each, place) for place, each in enumerate(inputs)]
    output = _port(inputs[like], len(inputs))
    layers = [
        f'<layer id="{place}" name="{place}" type="Parameter" version="opset1">'
        f'<data element_type="{each.get_element_type().to_string()}" shape="{_shape(each)}"/>'
        f"<output>{_port(each, 0)}</output></layer>"
        for place, each in enumerate(inputs)
    ]
    given = " ".join(f'{name}="{value}"' for name, value in attributes.items())
    count = len(inputs)
    layers.append(
        f'<layer id="{count}" name="operation" type="{kind}" version="extension"><data {given}/>'
        f"<input>{''.join(ports)}</input><output>{output}</output></layer>"
        f'<layer id="{count + 1}" name="result" type="Result" version="opset1">'
        f"<input>{_port(inputs[like], 0)}</input></layer>"
    )
    edges = [(place, 0, count, place) for place in range(count)] + [(count, count, count + 1, 0)]
    lines = (
        f'<edge from-layer="{first}" from-port="{port}" to-layer="{to}" to-port="{place}"/>'
        for first, port, to, place in edges
    )
    text = (
        f'<net name="operation" version="11"><layers>{"".join(layers)}</layers>'
        f"<edges>{''.join(lines)}</edges></net>"
    )
    model = _with_internal_operations().read_model(text.encode(), b"")
    operation = model.get_results()[0].input_value(0).get_node()
    operation.set_arguments(list(inputs))
    return [operation.output(0)]


def _port(value: Any, number: int) -> str:
    axes = "".join(f"<dim>{axis}</dim>" for axis in _axes(value))
    return f'<port id="{number}" precision="{_PRECISIONS[value.get_element_type()]}">{axes}</port>'


def _shape(value: Any) -> str:
    return ",".join("?" if axis < 0 else str(axis) for axis in _axes(value))


def _axes(value: Any) -> list[int]:
    shape = value.get_partial_shape()
    return [axis.get_length() if axis.is_static else -1 for axis in shape]


def _with_internal_operations() -> Any:
    core = ov.Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")
    return core
