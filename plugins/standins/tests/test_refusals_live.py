"""What NVIDIA's backends refuse is refused by the stand-ins, in a real Triton."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpc
from onnx import TensorProto, helper, save
from tritonclient.utils import InferenceServerException

from llmserve.errors import ServerError
from llmserve.testing import LiveTriton

pytestmark = pytest.mark.long

PYTORCH = 'platform: "pytorch_libtorch"'
ONNX = 'backend: "onnxruntime"'
# A batch waits until two sequences have a request in it.
BATCHING = """oldest { max_candidate_sequences: 4 preferred_batch_size: 2
      max_queue_delay_microseconds: 700000 }"""


class Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Precise(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x.double()


class Adding(torch.nn.Module):
    """Returns the sum of all inputs so far, in a state that grows."""

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.cat([past, x], 1)
        return total.sum(1, keepdim=True), total


def config(
    kind: str, *, x: str = "x__0", y: str = "y__0", state: tuple[str, str] | None = None
) -> str:
    lines = [
        kind,
        "max_batch_size: 8",
        f'input {{ name: "{x}" data_type: TYPE_FP32 dims: -1 }}',
        f'output {{ name: "{y}" data_type: TYPE_FP32 dims: -1 }}',
        "instance_group { kind: KIND_CPU count: 1 }",
    ]
    if state:
        lines.append(
            f"""sequence_batching {{ max_sequence_idle_microseconds: 60000000 {BATCHING}
              state {{ input_name: "{state[0]}" output_name: "{state[1]}" data_type: TYPE_FP32
                dims: -1 initial_state {{ name: "none" data_type: TYPE_FP32 dims: 1
                  zero_data: true }} }} }}"""
        )
    return "\n".join(lines) + "\n"


def place(triton: LiveTriton, name: str, text: str) -> Path:
    folder = triton.repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text)
    return folder / "1"


def trace(triton: LiveTriton, name: str, text: str, module: Any, *example: torch.Tensor) -> None:
    file = place(triton, name, text) / "model.pt"
    jit: Any = torch.jit
    jit.save(jit.trace(module, example), str(file))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    maps = ("source", "options", "components", "contract", "packages")
    words = dict.fromkeys(("recipe", "plugin", "exchange", "llmserve"), "")
    manifest = {
        **{key: {} for key in maps}, **words, "schema": 1, "name": name, "trust_remote_code": False,
        "part_of": "whole",
        "files": {"1/model.pt": digest},
    }  # fmt: skip
    (file.parents[1] / "llmserve.json").write_text(json.dumps(manifest))


def onnx_graph(triton: LiveTriton, name: str, text: str, *, kind: int = TensorProto.FLOAT) -> None:
    """Write a graph that adds up what it has read so far."""

    def tensor(called: str, size: str | int) -> Any:
        return helper.make_tensor_value_info(called, kind, ["rows", size])

    graph = helper.make_graph(
        [
            helper.make_node("Concat", ["past__1", "x__0"], ["total__1"], axis=1),
            helper.make_node("ReduceSum", ["total__1", "axes"], ["sum"], keepdims=1),
            helper.make_node("Concat", ["sum", "x__0"], ["y__0"], axis=1),
        ],
        "adding",
        [tensor("x__0", "new"), tensor("past__1", "old")],
        [tensor("y__0", "some"), tensor("total__1", "all")],
        [helper.make_tensor("axes", TensorProto.INT64, [1], [1])],
    )
    version = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=version, ir_version=8)
    save(model, str(place(triton, name, text) / "model.onnx"))


def ask(triton: LiveTriton, model: str, value: float, **sequence: Any) -> float:
    tensor = grpc.InferInput("x__0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[value]], np.float32))
    with grpc.InferenceServerClient(triton.server.grpc_url) as client:
        result = client.infer(model, [tensor], **sequence)
    output = result.get_response().outputs[0].name
    return float(result.as_numpy(output)[0, 0])


def load(triton: LiveTriton, name: str) -> None:
    triton.load(name)


def test_an_output_of_another_type_is_refused(triton: LiveTriton) -> None:
    trace(triton, "precise", config(PYTORCH), Precise(), torch.ones(2, 3))
    load(triton, "precise")
    with pytest.raises(InferenceServerException, match="y__0 as TYPE_FP32, and the graph gives fl"):
        ask(triton, "precise", 1)


def test_an_output_that_the_graph_does_not_have_is_refused(triton: LiveTriton) -> None:
    trace(triton, "absent", config(PYTORCH, y="y__5"), Doubling(), torch.ones(2, 3))
    load(triton, "absent")
    with pytest.raises(InferenceServerException, match=r"y__5 .* index 5, and the graph has 1"):
        ask(triton, "absent", 1)


def test_states_without_an_index_do_not_load(triton: LiveTriton) -> None:
    example = torch.ones(2, 3), torch.zeros(2, 1)
    text = config(PYTORCH, state=("past", "total"))
    trace(triton, "unnumbered", text, Adding(), *example)
    with pytest.raises(ServerError, match="name__index"):
        load(triton, "unnumbered")
    # Without states, names in the configuration's order are fine.
    trace(triton, "ordered", config(PYTORCH, x="in", y="out"), Doubling(), torch.ones(2, 3))
    load(triton, "ordered")


def test_an_onnx_graph_of_other_types_does_not_load(triton: LiveTriton) -> None:
    text = config(ONNX, state=("past__1", "total__1"))
    onnx_graph(triton, "double", text, kind=TensorProto.DOUBLE)
    with pytest.raises(ServerError, match="x__0 as TYPE_FP32, and the graph has"):
        load(triton, "double")


@pytest.mark.parametrize("kind", ["onnx", "pytorch"])
def test_a_batch_with_states_of_other_lengths_is_refused(triton: LiveTriton, kind: str) -> None:
    model = f"adding-{kind}"
    text = config(ONNX if kind == "onnx" else PYTORCH, state=("past__1", "total__1"))
    if kind == "onnx":
        onnx_graph(triton, model, text)
    else:
        trace(triton, model, text, Adding(), torch.ones(2, 3), torch.zeros(2, 1))
    load(triton, model)

    def together(*values: tuple[int, float, bool]) -> list[float | str]:
        def one(call: tuple[int, float, bool]) -> float | str:
            number, value, start = call
            try:
                return ask(triton, model, value, sequence_id=number, sequence_start=start)
            except InferenceServerException as error:
                return str(error.message())

        with ThreadPoolExecutor(len(values)) as pool:
            return list(pool.map(one, values))

    # States of one length run together, and keep their own values.
    assert together((1, 1, True), (2, 10, True)) == [1, 10]
    assert together((1, 2, False), (2, 20, False)) == [3, 30]
    # The inputs have the same shape, so Triton puts these into one batch.
    answers = together((1, 3, False), (3, 100, True))
    assert all("past__1 has the shapes [1] and [3]" in str(answer) for answer in answers), answers
    # What was refused has changed nothing.
    assert ask(triton, model, 4, sequence_id=1) == 7
