"""A workaround that can go is found out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from llmserve.graphs import openvino
from llmserve_openvino.workarounds import (
    forget_traces,
    internal_operation,
    keep_halves,
    read_model,
)


def test_openvino_has_no_public_name_for_paged_attention() -> None:
    """Once it has, ``use_paged_attention`` is not needed."""
    public = {*dir(openvino.passes), *dir(openvino)}
    assert not {name for name in public if "paged" in name.lower()}


def test_openvino_has_no_public_name_for_operations_on_states() -> None:
    """Once it has, ``internal_operation`` is not needed."""
    names = {name for name in dir(openvino) if name.startswith("opset")}
    public = {each for name in names for each in dir(getattr(openvino, name))}
    assert not {each for each in public if "causal_conv" in each or "delta" in each}


def test_operations_on_states_are_unknown_until_the_plugin_is_loaded(tmp_path: Path) -> None:
    """Once they are known, ``read_model`` is not needed."""
    ops, kinds = openvino.opset13, openvino.Type
    axes = ([-1, 4], [-1, 4, 3], [4, 1, 3], [4], *[[-1]] * 5)
    types = (kinds.f32,) * 4 + (kinds.i32,) * 5
    inputs = [ops.parameter(shape, kind) for shape, kind in zip(axes, types, strict=True)]
    found = internal_operation("PagedCausalConv1D", [each.output(0) for each in inputs], like=0)
    path = tmp_path / "model.xml"
    openvino.save_model(openvino.Model(found, inputs), path)
    assert "PagedCausalConv1D" in {each.get_type_name() for each in read_model(str(path)).get_ops()}
    code = "import sys, openvino; openvino.Core().read_model(sys.argv[1])"
    command = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode


@pytest.mark.skipif(
    "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"),
    reason="OpenVINO widens marked ones too here",
)
def test_weights_in_float16_are_widened_in_memory_unless_they_are_marked() -> None:
    """Once they are not, ``keep_halves`` is not needed."""
    ops = openvino.opset13
    count = 3000
    weight = np.ones((count, count), np.float16)

    def taken(*, is_marked: bool) -> int:
        before = anonymous()
        rows = ops.parameter([-1, count], openvino.Type.f32)
        product = ops.matmul(
            rows, ops.convert(ops.constant(weight, shared_memory=True), "f32"), False, True
        )
        model = openvino.Model([product], [rows])
        if is_marked:
            keep_halves(model)
        compiled = openvino.Core().compile_model(model, "CPU")
        for length in (1, 2):
            answer = compiled([np.ones((length, count), np.float32)])[0]
            assert answer[0, 0] == pytest.approx(count, rel=0.01)
        return anonymous() - before

    taken(is_marked=True)  # What OpenVINO itself takes once.
    assert taken(is_marked=True) < 1.5 * weight.nbytes
    assert taken(is_marked=False) > 2.5 * weight.nbytes


class Large(torch.nn.Module):
    """So many operations that the code of a trace takes megabytes."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for number in range(3000):
            values = torch.tanh(values * number + 1)
        return values


def test_pytorch_keeps_each_module_that_was_traced() -> None:
    """Once it does not, ``forget_traces`` is not needed."""

    def kept(*, is_forgotten: bool) -> int:
        before = anonymous()
        for _ in range(4):
            torch.jit.trace(Large(), torch.ones(2), check_trace=False)  # type: ignore[no-untyped-call]
            if is_forgotten:
                forget_traces()
        return anonymous() - before

    kept(is_forgotten=True)  # What is loaded once.
    forgotten = kept(is_forgotten=True)
    assert kept(is_forgotten=False) > forgotten + (10 << 20), forgotten


def anonymous() -> int:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return sum(int(kb) << 10 for kb in re.findall(r"(?m)^Anonymous: +(\d+) kB", text))


@pytest.mark.parametrize(
    "module",
    ["llmserve.graphs.stored", "llmserve_openvino.trial", "llmserve_openvino.recurrent_layers"],
)
def test_nothing_is_reported_over_the_network(module: str) -> None:
    """Its telemetry starts a process for each import and conversion."""
    loaded = f"import sys, {module}; print('openvino' in sys.modules, end=' ')"
    program = f"{loaded}; print(sys.modules['openvino_telemetry'])"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "None"]
