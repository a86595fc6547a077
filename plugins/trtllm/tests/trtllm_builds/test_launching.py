"""How a server of several processes is started, and how an engine is built."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.errors import ConfigError, IncompatibleError, LLMServeError
from llmserve_trtllm.building import printed, run
from llmserve_trtllm.commands import build_commands
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.versions import Version

from .building import ENGINES, build

SAYS = '#!/bin/sh\nprintf "%s\\n" "$@"\n'


def engine_of(folder: Path, tensor_parallel: int) -> Path:
    shutil.copytree(ENGINES / "1.2", folder)
    content = json.loads((folder / "config.json").read_text())
    content["pretrained_config"]["mapping"] = {"tp_size": tensor_parallel, "pp_size": 1}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def started(folder: Path, *words: str) -> list[str]:
    """Run a script with an mpirun that says what it is told."""
    tools = folder.parent.parent / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "mpirun").write_text(SAYS)
    (tools / "mpirun").chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    command = ["sh", str(folder / "launch.sh"), *words]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_leader_mode_starts_a_server_for_each_rank(tmp_path: Path) -> None:
    build(tmp_path, "1.2.1", engine=str(engine_of(tmp_path / "engine", 2)))
    words = started(tmp_path / "1.2.1" / "ensemble", "/my models", "--http-port=9")
    text = "\n".join(words)
    first, second = text.split("\n:\n")
    for rank, part in enumerate((first, second)):
        assert "-n\n1\ntritonserver\n--model-repository=/my models" in part
        assert f"shm-region-prefix-name=prefix{rank}_" in part
        assert "--disable-auto-complete-config" in part
        assert "--http-port=9" in part
    assert "--load-model" not in first
    assert "--model-control-mode=explicit\n--load-model=tensorrt_llm" in second


def test_an_orchestrator_starts_the_others_itself(tmp_path: Path) -> None:
    engine = str(engine_of(tmp_path / "engine", 2))
    build(tmp_path, "1.2.1", engine=engine, multi_gpu="orchestrator")
    folder = tmp_path / "1.2.1" / "ensemble"
    assert "export TRTLLM_ORCHESTRATOR=1" in (folder / "launch.sh").read_text()
    words = started(folder, "/models")
    assert words.count("tritonserver") == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0", r"the GPUs 0 for an instance, and the engine .* runs in 2 processes"),
        ("0,0", "each once"),
        ("0,1;2", "the GPUs 2 for an instance"),
        ("first", "write numbers, as in 0,1"),
    ],
)
def test_gpus_have_to_be_as_many_as_the_engines_processes(
    tmp_path: Path, given: str, message: str
) -> None:
    engine = str(engine_of(tmp_path / "engine", 2))
    with pytest.raises(LLMServeError, match=message):
        build(tmp_path, "1.2.1", engine=engine, gpu_device_ids=given)
    made = build(tmp_path, "1.2.1", engine=engine, gpu_device_ids="0,1;2,3")
    assert made["tensorrt_llm"].parameters["gpu_device_ids"].string_value == "0,1;2,3"


def test_one_process_needs_no_script(tmp_path: Path) -> None:
    build(tmp_path, "1.2.1")
    assert not list(tmp_path.rglob("launch.sh"))


def target(version: str, batching: str = "inflight", **options: Any) -> Target:
    defaults: dict[str, Any] = {
        "max_batch_size": 8, "max_input_len": 1024, "max_seq_len": 2048, "max_beam_width": 1,
        "dtype": "float16", "quantization": "", "tensor_parallel": 2, "pipeline_parallel": 1,
        "examples": "examples",
    }  # fmt: skip
    return Target(Version.parse(version), {**defaults, **options}, batching, "max_utilization")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.5.0", ["examples/llama/build.py", "--use_inflight_batching", "--world_size 2"]),
        ("0.12.0", ["examples/llama/convert_checkpoint.py", "trtllm-build", "--max_seq_len 2048"]),
        ("0.19.0", ["examples/models/core/llama/convert_checkpoint.py", "--workers 2"]),
        ("1.2.1", ["from tensorrt_llm._tensorrt_engine import LLM", "tensor_parallel_size=2"]),
    ],
)
def test_an_engine_is_built_by_the_tools_of_its_version(version: str, expected: list[str]) -> None:
    commands = build_commands(target(version), Path("/llama"), "llama", Path("/engine"))
    line = printed(commands)
    for words in expected:
        assert words in line
    assert "/engine" in line


def test_static_engines_of_the_first_version_are_built_without_in_flight() -> None:
    commands = build_commands(target("0.5.0", "static"), Path("/llama"), "llama", Path("/engine"))
    assert "--use_inflight_batching" not in commands[0]


@pytest.mark.parametrize(
    ("version", "quantization", "expected"),
    [
        ("0.12.0", "int8", "--use_weight_only --weight_only_precision int8"),
        ("0.12.0", "fp8", "quantization/quantize.py"),
        ("1.2.1", "fp8", "QuantAlgo.FP8"),
        ("1.2.1", "int4_awq", "QuantAlgo.W4A16_AWQ"),
    ],
)
def test_quantization_is_said_in_the_words_of_the_version(
    version: str, quantization: str, expected: str
) -> None:
    asked = target(version, quantization=quantization)
    line = printed(build_commands(asked, Path("/llama"), "llama", Path("/engine")))
    assert expected in line


def test_a_family_that_has_no_example_is_told() -> None:
    with pytest.raises(IncompatibleError, match="which of TensorRT-LLM's examples converts rwkv"):
        build_commands(target("0.12.0"), Path("/m"), "rwkv", Path("/e"))


def test_without_tensorrt_llm_the_exact_commands_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        llmserve.build(
            "trtllm", "demo", output=tmp_path / "r", build_engine=True, trtllm_version="0.12",
            engine=str(tmp_path / "engine"),
        )  # fmt: skip
    text = str(caught.value)
    assert "24.08-trtllm-python-py3" in text
    assert f"trtllm-build --checkpoint_dir {tmp_path}/engine-checkpoint" in text
    assert "--gpt_variant gpt2" in text
    assert "\n" not in text
    assert not (tmp_path / "r").exists()


def test_building_keeps_a_log_and_tells_what_comes(tmp_path: Path) -> None:
    told: list[str] = []
    log = tmp_path / "engine.log"
    run(["python3", "-c", "print('layer 1'); print('layer 2')"], log, told.append)
    assert [line.partition(": ")[2] for line in told[1:]] == ["layer 1", "layer 2"]
    assert "layer 1\nlayer 2\n" in log.read_text()
    with pytest.raises(ConfigError, match=r"ended with 3.*see .*engine\.log"):
        run(["python3", "-c", "raise SystemExit(3)"], log, told.append)
    with pytest.raises(ConfigError, match="cannot be run"):
        run(["no-such-tool"], log, told.append)
