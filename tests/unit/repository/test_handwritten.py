"""The traps of Triton's tutorials are found in models that were written after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.repository.check import check_repository
from tests.live.tutorials.configs import CONFIGS
from tests.support import ROOT

MODELS = ROOT / "tests/live/tutorials/models"
GROWS = "a list that grows with each request is sent whole"
FIRST = "the first request's value is taken for the whole batch"
_INPUT = 'input { name: "text_input" data_type: TYPE_STRING dims: [-1] optional: true }\n'
_OUTPUT = 'output { name: "text_output" data_type: TYPE_STRING dims: [-1] }\n'


def notes(folder: Path, config: str, code: str) -> list[str]:
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "config.pbtxt").write_text(config, encoding="utf-8")
    (folder / "m" / "1" / "model.py").write_text(code, encoding="utf-8")
    problems = check_repository(folder)
    assert not any(problem.fatal for problem in problems), problems
    return [problem.message for problem in problems]


@pytest.mark.parametrize(
    ("name", "traps"),
    [
        ("falcon", {GROWS, "max_length counts the prompt", "fails all requests of its batch"}),
        ("llama_python", {GROWS, FIRST}),
        ("iterative", {"raises KeyError", "goes on after its client", "broken pieces"}),
        ("detokenizer", {GROWS, "raises LookupError"}),
    ],
)
def test_the_traps_of_a_tutorial_are_found(tmp_path: Path, name: str, traps: set[str]) -> None:
    config = CONFIGS[name].replace("FOLDER", "gpt2")
    code = (MODELS / f"{name}.py").read_text(encoding="utf-8")
    found = notes(tmp_path, config, code)
    for trap in traps:
        assert any(trap in note for note in found), (trap, found)


@pytest.mark.parametrize(
    ("config", "code", "trap"),
    [
        ("", 'import os\nos.environ["TRANSFORMERS_CACHE"] = "/x"\n', "1/model.py:2: TRANSFORMERS"),
        ("instance_group { kind: KIND_GPU gpus: [0] }",
         'pipeline("text-generation", device_map="auto")\n', "takes all GPUs"),
        ("", 'text = pb.get_input_tensor_by_name(request, "text_input").as_numpy()\n',
         "None has no as_numpy"),
        ("max_batch_size: 4 sequence_batching { oldest { } }", "pass\n",
         "config.pbtxt: oldest without"),
        ("max_batch_size: 4 sequence_batching { direct { minimum_slot_utilization: 1 "
         "max_queue_delay_microseconds: 1000000 } }", "pass\n", "a step waits for its delay"),
    ],
)  # fmt: skip
def test_each_trap_says_where_it_is(tmp_path: Path, config: str, code: str, trap: str) -> None:
    text = f'backend: "python"\n{_INPUT}{_OUTPUT}{config}\n'
    assert any(trap in note for note in notes(tmp_path, text, code))


def test_a_model_without_traps_has_no_note(tmp_path: Path) -> None:
    code = """
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb.get_input_tensor_by_name(request, "text_input")
            if tensor is None:
                error = pb.TritonError("text_input is missing")
                responses.append(pb.InferenceResponse([], error))
                continue
            texts = []
            for row in tensor.as_numpy():
                texts.append(row.decode("utf-8", errors="replace").upper())
            answer = pb.Tensor("text_output", np.array(texts, dtype=object))
            responses.append(pb.InferenceResponse([answer]))
        return responses
"""
    config = f'backend: "python"\nmax_batch_size: 4\n{_INPUT}{_OUTPUT}dynamic_batching {{ }}\n'
    assert notes(tmp_path, config, code) == []


@pytest.mark.parametrize("code", ["def (", "\0", "(" * 5000])
def test_code_that_cannot_be_parsed_is_one_problem(tmp_path: Path, code: str) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    config = f'backend: "python"\n{_INPUT}{_OUTPUT}'
    (tmp_path / "m/config.pbtxt").write_text(config, encoding="utf-8")
    (tmp_path / "m/1/model.py").write_text(code, encoding="utf-8")
    (problem,) = check_repository(tmp_path)
    assert "is not valid Python" in problem.message
