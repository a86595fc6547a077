"""What `llmserve serve` says of backends that are not what they are called."""

from __future__ import annotations

from pathlib import Path

from llmserve_cli.standins import stand_ins


def model(repository: Path, name: str, text: str) -> str:
    (repository / name).mkdir()
    (repository / name / "config.pbtxt").write_text(text)
    return name


def test_every_backend_that_python_stands_in_for_is_named(tmp_path: Path) -> None:
    models = [
        model(tmp_path, "llama_tensorrt_llm", 'backend: "tensorrtllm"'),
        model(tmp_path, "other_tensorrt_llm", 'backend: "tensorrtllm"'),
        model(tmp_path, "plain", 'backend: "python"'),
        model(tmp_path, "whole", 'platform: "ensemble"'),
        model(tmp_path, "broken", "backend:"),
    ]
    assert stand_ins(tmp_path, [*models, "gone"]) == [
        "stand-in for the backend tensorrtllm, in Python: llama_tensorrt_llm, other_tensorrt_llm"
    ]
