"""Matrix products of a loaded graph by oneDNN, where torch would ask its BLAS library.

A traced graph's ``addmm`` and ``linear`` go to MKL in float32, which makes little of processors
that are not Intel's, and least of the few rows of a step of decoding. The torch of PyPI has oneDNN
beside it. What is changed is the graph in memory: the file must load wherever libtorch is, and not
every libtorch has these products.
"""

from __future__ import annotations

from typing import Any

_PRODUCT = """
graph(%rows : Tensor, %weight : Tensor, %bias : Tensor?):
  %after : str = prim::Constant[value="none"]()
  %numbers : Scalar?[] = prim::ListConstruct()
  %way : str = prim::Constant[value=""]()
  %product : Tensor = mkldnn::_linear_pointwise(%rows, %weight, %bias, %after, %numbers, %way)
  return (%product)
"""


def use(module: Any) -> int:
    """Have oneDNN make a frozen module's products in float32, and return how many there are.

    The others stay as they are; all of them where this torch has no oneDNN.
    """
    import torch

    # A graph can be changed by what torch itself changes graphs with, and by nothing else.
    changing: Any = torch._C
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0
    graph, product = module.graph, changing.parse_ir(_PRODUCT)
    found = [(node, parts) for node in graph.nodes() if (parts := _parts(node)) is not None]
    for node, (rows, weight, bias) in found:
        graph.setInsertPoint(node)
        (made,) = graph.insertGraph(product, [rows, graph.insertConstant(weight), bias])
        node.output().replaceAllUsesWith(made)
        node.destroy()
    return len(found)


def _parts(node: Any) -> tuple[Any, Any, Any] | None:
    """Return rows, weights with a row for each output, and bias of what oneDNN can make."""
    if node.kind() == "aten::linear":
        rows, weight, bias = node.inputs()
        weights = _constant(weight, 2)
    elif node.kind() == "aten::addmm":
        bias, rows, weight, *factors = node.inputs()
        if [factor.toIValue() for factor in factors] != [1, 1]:
            return None
        weights = _constant(weight, 2)
        # Weights that are the other way round are read that way: nothing is copied.
        weights = None if weights is None else weights.t()
    else:
        return None
    if weights is None or (not bias.node().mustBeNone() and _constant(bias, 1) is None):
        return None
    return rows, weights, bias


def _constant(value: Any, dimensions: int) -> Any:
    """Return the tensor of so many dimensions that a value always is, in float32 on the CPU."""
    import torch

    constant = value.toIValue()
    fits = (
        isinstance(constant, torch.Tensor)
        and constant.dtype == torch.float32
        and constant.device.type == "cpu"
        and constant.dim() == dimensions
    )
    return constant if fits else None
