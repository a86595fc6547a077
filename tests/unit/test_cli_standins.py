"""What `llmserve serve` says of backends that are not what they are called."""

from __future__ import annotations

from llmserve_cli.standins import stand_ins
from tests.unit.pages import published

PAGE = """
# TYPE llmserve_stand_in gauge
llmserve_stand_in{instead_of="TensorRT-LLM",model="llama_tensorrt_llm"} 1
llmserve_stand_in{instead_of="TensorRT-LLM",model="other_tensorrt_llm"} 1
llmserve_stand_in{instead_of="Triton's backend onnxruntime",model="gpt2_generator"} 1
nv_inference_count{model="plain",version="1"} 7
"""


def test_every_part_that_is_stood_in_for_is_named() -> None:
    with published(PAGE) as url:
        assert stand_ins(url) == [
            "stand-in for Triton's backend onnxruntime, in Python: gpt2_generator",
            "stand-in for TensorRT-LLM, in Python: llama_tensorrt_llm, other_tensorrt_llm",
        ]


def test_a_server_without_stand_ins_or_without_metrics_has_none() -> None:
    with published('nv_inference_count{model="plain"} 7\n') as url:
        assert stand_ins(url) == []
    assert stand_ins("http://127.0.0.1:1/metrics") == []
