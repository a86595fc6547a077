"""Tests of the stand-ins for native backends: batches of equal shapes, and state per sequence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmserve.testing import FakeBackendUtils, FakeRequest
from llmserve_standins.graphs import END, START, ServedGraph
from llmserve_standins.pytorch import model as torch_model

PLAIN: dict[str, Any] = {
    "name": "sum",
    "max_batch_size": 8,
    "backend": "onnxruntime",
    "input": [{"name": "x__0", "data_type": "TYPE_FP32", "dims": ["-1"]}],
    "output": [{"name": "y__0", "data_type": "TYPE_FP32", "dims": ["-1"]}],
}
STATEFUL: dict[str, Any] = {
    "sequence_batching": {
        "max_sequence_idle_microseconds": "60000000",
        "state": [
            {
                "input_name": "past__1",
                "output_name": "total__1",
                "data_type": "TYPE_FP32",
                "dims": ["-1"],
            }
        ],
    }
}


class Adding(torch.nn.Module):
    """Returns the sum of all inputs so far, in a state that grows."""

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.cat([past, x.sum(1, keepdim=True)], 1)
        return total.sum(1, keepdim=True), total


class Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def serve(tmp_path: Path, module: torch.nn.Module, config: Any, *example: Any) -> ServedGraph:
    jit: Any = torch.jit
    (tmp_path / "1").mkdir()
    file = tmp_path / "1" / "model.pt"
    jit.trace(module, example).save(str(file))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "llmserve.json").write_text(json.dumps({"files": {"1/model.pt": digest}}))
    args = {
        "model_repository": str(tmp_path), "model_version": "1", "model_instance_kind": "CPU",
        "model_config": json.dumps(config),
    }  # fmt: skip
    model = torch_model.TritonPythonModel()
    model.start(args, FakeBackendUtils())
    return model


def ask(model: ServedGraph, *requests: FakeRequest) -> list[Any]:
    responses = model.execute(requests)
    assert not [response.error.message() for response in responses if response.error]
    return [response.tensors["y__0"].tolist() for response in responses]


def make_request(values: Sequence[Sequence[float]], **extra: Any) -> FakeRequest:
    return FakeRequest({"x__0": np.array(values, np.float32)}, **extra)


@pytest.fixture
def adding(tmp_path: Path) -> ServedGraph:
    config = {**PLAIN, **STATEFUL}
    return serve(tmp_path, Adding(), config, torch.ones((2, 3)), torch.zeros((2, 1)))


def test_a_plain_model_answers_batches_and_shapes_of_all_kinds(tmp_path: Path) -> None:
    model = serve(tmp_path, Doubling(), PLAIN, torch.ones((2, 3)))
    requests = [make_request(values) for values in ([[1, 2]], [[3]], [[4, 5], [6, 7]])]
    assert ask(model, *requests) == [[[2, 4]], [[6]], [[8, 10], [12, 14]]]


def test_each_sequence_keeps_its_own_state_between_requests(adding: ServedGraph) -> None:
    first = ask(
        adding,
        make_request([[1]], sequence=1, flags=START),
        make_request([[10]], sequence=2, flags=START),
    )
    assert first == [[[1]], [[10]]]
    later = ask(adding, make_request([[20]], sequence=2), make_request([[2]], sequence=1))
    assert later == [[[30]], [[3]]]
    ask(adding, make_request([[100]], sequence=3, flags=START))
    assert ask(adding, make_request([[5]], sequence=1, flags=START)) == [[[5]]]
    for key in (1, 2, 3):
        ask(adding, make_request([[0]], sequence=key, flags=END))
    assert adding.states == {}


def test_states_of_other_lengths_in_a_batch_are_refused(adding: ServedGraph) -> None:
    ask(adding, make_request([[1]], sequence=1, flags=START))
    requests = [
        make_request([[2]], sequence=1),
        make_request([[100]], sequence=2, flags=START),
        # Of other inputs, so that Triton would not put it into this batch.
        make_request([[3, 4]], sequence=3, flags=START),
    ]
    *refused, answered = adding.execute(requests)
    for response in refused:
        assert "past__1 has the shapes [1] and [2]" in response.error.message()
    assert answered.tensors["y__0"].tolist() == [[7]]
    assert ask(adding, make_request([[2]], sequence=1)) == [[[3]]]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"input": [{**PLAIN["input"][0], "name": "x__1"}]}, "have the places"),
        ({"input": [*PLAIN["input"], {**PLAIN["input"][0], "name": "z__1"}]}, "declares 2 inputs"),
        ({**STATEFUL, "output": [{**PLAIN["output"][0], "name": "y"}]}, "named name__index"),
    ],
)
def test_tensors_that_libtorch_would_not_find_are_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    module: tuple[Any, ...] = (Doubling(), torch.ones((2, 3)))
    if "sequence_batching" in changes:
        module = (Adding(), torch.ones((2, 3)), torch.zeros((2, 1)))
    with pytest.raises(RuntimeError, match=problem):
        serve(tmp_path, module[0], {**PLAIN, **changes}, *module[1:])


def test_inputs_named_as_arguments_are_passed_by_name(tmp_path: Path) -> None:
    class Difference(torch.nn.Module):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return first - second

    inputs = [{**PLAIN["input"][0], "name": name} for name in ("second", "first")]
    model = serve(tmp_path, Difference(), {**PLAIN, "input": inputs}, *torch.ones((2, 2, 3)))
    feeds = {"second": np.ones((1, 1), np.float32), "first": np.full((1, 1), 5, np.float32)}
    assert ask(model, FakeRequest(feeds)) == [[[4]]]


@pytest.mark.parametrize("manifest", [None, "{", "{}", json.dumps({"files": {"1/model.pt": "0"}})])
def test_torchscript_that_llmserve_has_not_built_is_not_run(
    tmp_path: Path, manifest: str | None
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.pt").write_bytes(b"anything")
    if manifest is not None:
        (tmp_path / "llmserve.json").write_text(manifest)
    with pytest.raises(RuntimeError, match="not the file that llmserve built"):
        torch_model.check_manifest(tmp_path / "1" / "model.pt", tmp_path)
