"""Which models a stand-in answers, read from the server's metrics; which backends are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.errors import ConfigError
from llmserve.roles import Backend
from llmserve.server import ServerSettings, find_problems
from llmserve.server.server import stand_ins
from tests.unit.pages import published

PAGE = """
# TYPE llmserve_stand_in gauge
llmserve_stand_in{instead_of="TensorRT-LLM",model="llama_tensorrt_llm"} 1
llmserve_stand_in{instead_of="TensorRT-LLM",model="other_tensorrt_llm"} 1
llmserve_stand_in{instead_of="Triton's backend onnxruntime",model="gpt2_generator"} 1
llmserve_stand_in{instead_of="TensorRT-LLM",model="gone"} 0
nv_inference_count{model="plain",version="1"} 7
"""


def test_every_part_that_is_stood_in_for_is_named() -> None:
    with published(PAGE) as url:
        assert stand_ins(url) == {
            "llama_tensorrt_llm": "TensorRT-LLM",
            "other_tensorrt_llm": "TensorRT-LLM",
            "gpt2_generator": "Triton's backend onnxruntime",
        }


def test_a_server_without_stand_ins_or_without_metrics_has_none() -> None:
    with published('nv_inference_count{model="plain"} 7\n') as url:
        assert stand_ins(url) == {}
    assert stand_ins("http://127.0.0.1:1/metrics") == {}


@pytest.mark.parametrize("config", ['backend: "acme"', 'platform: "acme_graph"'])
def test_a_model_whose_backend_is_missing_is_named(tmp_path: Path, config: str) -> None:
    for name, text in (("needy", config), ("plain", 'backend: "python"'), ("damaged", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(text)
    settings = ServerSettings(tmp_path, runtime="embedded", backends=())
    (problem,) = find_problems(settings)
    assert isinstance(problem, ConfigError)
    assert "model 'needy' needs Triton's backend 'acme'" in problem.problem
    assert "llmserve-standins" in str(problem.mend)
    assert find_problems(ServerSettings(tmp_path, "embedded", models=("plain",), backends=())) == []
    acme = Backend(name="acme", summary="", folder=tmp_path)
    assert find_problems(ServerSettings(tmp_path, "embedded", backends=(acme,))) == []
    assert find_problems(ServerSettings(tmp_path, "docker", backends=())) == []


def test_a_repository_or_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    (problem,) = find_problems(ServerSettings(tmp_path / "gone"))
    assert problem.exit_code == 3
    (tmp_path / "demo").mkdir()
    (problem,) = find_problems(ServerSettings(tmp_path, models=("dmeo",)))
    assert "no model 'dmeo'" in problem.problem
    assert "demo" in str(problem.mend)
