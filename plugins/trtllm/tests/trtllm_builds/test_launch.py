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
from llmserve.errors import ConfigError, IncompatibleError, LLMServeError, OptionError
from llmserve_trtllm.build_engine import build_commands, printed, run
from llmserve_trtllm.target import Target
from llmserve_trtllm.versions import Version

from .building import ENGINES, build

# Runs what it is told for each rank, one after another.
MPIRUN = """#!/bin/sh
echo mpirun "$@"
[ "$1" = --allow-run-as-root ] && shift
set -- "$@" :
command=
for word do
  case "$word" in
    :) sh -c "$command"; command= ;;
    -n | 1) [ -z "$command" ] || command="$command '$word'" ;;
    *) command="$command '$word'" ;;
  esac
done
"""


def engine_of(folder: Path, tensor_parallel: int) -> Path:
    shutil.copytree(ENGINES / "1.2", folder)
    content = json.loads((folder / "config.json").read_text())
    content["pretrained_config"]["mapping"] = {"tp_size": tensor_parallel, "pp_size": 1}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def started(folder: Path, *words: str) -> list[str]:
    """Run a script with tools that say what they are told."""
    tools = folder.parent.parent / "tools"
    tools.mkdir(exist_ok=True)
    gpus = "#!/bin/sh\necho 'GPU 0: H200 (UUID: a)'; echo 'GPU 1: H200 (UUID: b)'\n"
    says = '#!/bin/sh\necho tritonserver "$@"\n'
    for name, text in (("mpirun", MPIRUN), ("tritonserver", says), ("nvidia-smi", gpus)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    command = ["sh", str(folder / "launch.sh"), *words]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_leader_mode_starts_a_server_for_each_rank(tmp_path: Path) -> None:
    build(tmp_path, "1.2.1", engine=str(engine_of(tmp_path / "engine", 2)))
    asked = ("--model-control-mode=explicit", "--load-model=ensemble", "--http-port=9")
    _, first, second = started(tmp_path / "1.2.1" / "ensemble", "/my models", *asked)
    for rank, line in enumerate((first, second)):
        assert line.startswith("tritonserver --model-repository=/my models ")
        assert f"shm-region-prefix-name=prefix{rank}_" in line
        assert "--disable-auto-complete-config" in line
        assert line.endswith("--http-port=9")
    # Whatever the first loads, the others load the engine and nothing else.
    assert first.count("--load-model=") == second.count("--load-model=") == 1
    assert "--load-model=ensemble" in first
    assert "--model-control-mode=explicit --load-model=tensorrt_llm " in second
    assert second.count("--model-control-mode") == 1


@pytest.mark.parametrize(("version", "frees_memory"), [("0.12.0", False), ("1.2.1", True)])
def test_an_orchestrator_starts_the_others_itself(
    tmp_path: Path, version: str, frees_memory: bool
) -> None:
    build(tmp_path, version, multi_gpu="orchestrator", gpu_device_ids="0;1")
    folder = tmp_path / version / "ensemble"
    assert "export TRTLLM_ORCHESTRATOR=1" in (folder / "launch.sh").read_text()
    mpirun, server = started(folder, "/models", "--http-port=9")
    assert mpirun.count("tritonserver") == 1
    assert server.endswith("--http-port=9")
    flags = (
        "--pinned-memory-pool-byte-size=0", "--enable-peer-access=false",
        "--cuda-memory-pool-byte-size=0:0", "--cuda-memory-pool-byte-size=1:0",
    )  # fmt: skip
    assert all((flag in server) == frees_memory for flag in flags)


def test_the_llm_api_on_several_gpus_is_started_by_mpirun(tmp_path: Path) -> None:
    build(tmp_path, "1.2.1", layout="llmapi", tensor_parallel=2)
    mpirun, server = started(tmp_path / "1.2.1" / "ensemble", "/models")
    assert mpirun.startswith("mpirun --allow-run-as-root -n 1 tritonserver ")
    assert "--model-repository=/models" in server


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0", r"the GPUs 0 for an instance, and the engine .* runs in 2 processes"),
        ("0,0", "each once"),
        ("0,1;2", "the GPUs 2 for an instance"),
        ("first", "write numbers, as in 0,1"),
        ("0,1;2,3", "in leader mode a server has one: give --multi-gpu orchestrator"),
    ],
)
def test_gpus_have_to_be_as_many_as_the_engines_processes(
    tmp_path: Path, given: str, message: str
) -> None:
    engine = str(engine_of(tmp_path / "engine", 2))
    with pytest.raises(LLMServeError, match=message):
        build(tmp_path, "1.2.1", engine=engine, gpu_device_ids=given)


def test_every_group_of_gpus_is_an_instance(tmp_path: Path) -> None:
    engine = str(engine_of(tmp_path / "engine", 2))
    asked = {"gpu_device_ids": "0,1;2,3", "multi_gpu": "orchestrator"}
    model = build(tmp_path, "1.2.1", engine=engine, **asked)["tensorrt_llm"]
    assert model.parameters["gpu_device_ids"].string_value == "0,1;2,3"
    assert [group.count for group in model.instance_group] == [2]


def test_one_process_needs_no_script(tmp_path: Path) -> None:
    build(tmp_path, "1.2.1")
    assert not list(tmp_path.rglob("launch.sh"))


def target(version: str, batching: str = "inflight", **options: Any) -> Target:
    defaults: dict[str, Any] = {
        "max_batch_size": 8, "max_input_len": 1024, "max_seq_len": 2048, "max_beam_width": 1,
        "dtype": "float16", "quantization": "", "tensor_parallel": 2, "pipeline_parallel": 1,
        "examples": "examples",
    }  # fmt: skip
    asked = {**defaults, **options}
    return Target(Version.parse(version), asked, batching, "max_utilization", streams=False)


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


def test_lengths_without_room_for_an_answer_are_refused() -> None:
    asked = target("0.12.0", max_input_len=2048, max_seq_len=1024)
    with pytest.raises(OptionError, match="no room for an answer in max_seq_len 1024"):
        build_commands(asked, Path("/llama"), "llama", Path("/engine"))


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
