"""What is done here because OpenVINO has no public name for it."""

from __future__ import annotations

from typing import Any


def use_paged_attention(model: Any) -> None:
    """Replace a model's attention and its state, in place, by attention that reads pages.

    OpenVINO's C++ library has the pass under a public name (``ov::pass::SDPAToPagedAttention``),
    its Python package only under a private one: seen in 2026.4.1. Once ``openvino.passes``
    has it, ``test_openvino_workarounds.py`` fails, and this can go.
    """
    from openvino._offline_transformations import paged_attention_transformation

    paged_attention_transformation(model)
