"""Which quantised checkpoints are read as they are, by what their configuration says of them."""

from __future__ import annotations

from llmserve.plugin import Quantised, Treatment

_FORMS = {
    ("gptq", ""), ("gptq", "gptq"), ("gptq", "gptq_v2"),
    ("awq", ""), ("awq", "gemm"),
    ("compressed-tensors", "pack-quantized"), ("compressed-tensors", "int-quantized"),
    ("compressed-tensors", "float-quantized"), ("compressed-tensors", "naive-quantized"),
    ("fp8", ""),
}  # fmt: skip
_BITS = {"gptq": (4, 8), "awq": (4,), "compressed-tensors": (4, 8), "fp8": (0, 8)}
_ONLY_8 = ("int-quantized", "float-quantized", "naive-quantized")
_FLOATS = ("float-quantized", "naive-quantized")
"""Forms of weights that have an exponent: there is no packed weight for them."""


def treatment(found: Quantised) -> Treatment:
    """Return what becomes of weights that are quantised in such a way."""
    if (found.method, found.form) not in _FORMS or found.bits not in _BITS[found.method]:
        return ""
    if found.bits != 8 and found.form in _ONLY_8:
        return ""
    return "widened" if found.method == "fp8" or found.form in _FLOATS else "kept"
