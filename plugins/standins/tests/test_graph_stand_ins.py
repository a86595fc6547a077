"""The stand-ins for native backends: any graph, equal shapes together, state for each sequence."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmserve.testing import FakeBackendUtils, FakeRequest
from llmserve_standins.graphs import END, START, ServedGraph
from llmserve_standins.pytorch import model as torch_model

SUM: dict[str, Any] = {
    "name": "sum",
    "max_batch_size": 8,
    "backend": "onnxruntime",
    "input": [{"name": "x__0", "data_type": "TYPE_FP32", "dims": ["-1"]}],
    "output": [{"name": "y__0", "data_type": "TYPE_FP32", "dims": ["-1"]}],
}
KEPT: dict[str, Any] = {
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
    """Gives what it has got so far, in a state that grows."""

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.cat([past, x.sum(1, keepdim=True)], 1)
        return total.sum(1, keepdim=True), total


class Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def scripted(tmp_path: Path, module: torch.nn.Module, config: Any, *example: Any) -> ServedGraph:
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
    serving = torch_model.TritonPythonModel()
    serving.start(args, FakeBackendUtils())
    return serving


def ask(serving: ServedGraph, *requests: FakeRequest) -> list[Any]:
    answers = serving.execute(requests)
    assert not [answer.error.message() for answer in answers if answer.error]
    return [answer.tensors["y__0"].tolist() for answer in answers]


def given(values: list[list[float]], **extra: Any) -> FakeRequest:
    return FakeRequest({"x__0": np.array(values, np.float32)}, **extra)


@pytest.fixture
def adding(tmp_path: Path) -> ServedGraph:
    return scripted(tmp_path, Adding(), {**SUM, **KEPT}, torch.ones((2, 3)), torch.zeros((2, 1)))


def test_a_plain_model_answers_batches_and_shapes_of_all_kinds(tmp_path: Path) -> None:
    serving = scripted(tmp_path, Doubling(), SUM, torch.ones((2, 3)))
    answers = ask(serving, given([[1, 2]]), given([[3]]), given([[4, 5], [6, 7]]))
    assert answers == [[[2, 4]], [[6]], [[8, 10], [12, 14]]]


def test_state_goes_from_request_to_request_of_its_own_sequence(adding: ServedGraph) -> None:
    first = ask(
        adding,
        given([[1]], sequence=1, flags=START),
        given([[10]], sequence=2, flags=START),
    )
    assert first == [[[1]], [[10]]]
    # In another order, with another beside them whose state is shorter.
    later = ask(
        adding,
        given([[20]], sequence=2),
        given([[100]], sequence=3, flags=START),
        given([[2]], sequence=1),
    )
    assert later == [[[30]], [[100]], [[3]]]
    assert ask(adding, given([[5]], sequence=1, flags=START)) == [[[5]]]
    ask(adding, *(given([[0]], sequence=key, flags=END) for key in (1, 2, 3)))
    assert adding.kept == {}


@pytest.mark.parametrize("manifest", [None, "{", "{}", json.dumps({"files": {"1/model.pt": "0"}})])
def test_torchscript_that_llmserve_has_not_built_is_not_run(
    tmp_path: Path, manifest: str | None
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.pt").write_bytes(b"anything")
    if manifest is not None:
        (tmp_path / "llmserve.json").write_text(manifest)
    with pytest.raises(RuntimeError, match="not what llmserve built"):
        torch_model.check_built_here(tmp_path / "1" / "model.pt", tmp_path)
