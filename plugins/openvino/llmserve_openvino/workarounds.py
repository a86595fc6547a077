"""What is done here because OpenVINO has no public name for it."""

from __future__ import annotations

from typing import Any

from llmserve.graphs import openvino as ov

_READERS = {"MatMul", "Gather"}
"""What reads the weights that are large: products, and the table of tokens."""


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
