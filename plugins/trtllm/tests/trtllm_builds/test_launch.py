"""Tests of starting a server with several processes, and of building an engine."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llmserve.contract.container import closed, release
from llmserve.errors import ConfigError, LLMServeError
from llmserve_trtllm.build_engine import build_commands, run
from llmserve_trtllm.target import BuildTarget
from llmserve_trtllm.versions import CONTAINERS, Version

from .building import DEFAULTS, build, cases, engine_of

TOOLS = Path(__file__).with_name("tools")


def engine_with_two_ranks(folder: Path) -> str:
    mapping = {"tp_size": 2, "pp_size": 1}
    return str(engine_of(folder / "engine", "1.2.1", {"pretrained_config.mapping": mapping}))


def launch(folder: Path, *arguments: str) -> list[str]:
    """Run a build's launch script with tools that print their arguments."""
    (script,) = folder.glob("*/ensemble/launch.sh")
    env = {**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}"}
    command = ["sh", str(script), *arguments]
    completed = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return completed.stdout.splitlines()


def test_leader_mode_starts_a_server_for_each_rank(tmp_path: Path) -> None:
    build(tmp_path, "1.2.1", engine=engine_with_two_ranks(tmp_path))
    for folder in ("ensemble", "."):
        dockerfile = (tmp_path / "1.2.1" / folder / "Dockerfile").read_text()
        assert 'CMD ["sh", \\\n     "/models/ensemble/launch.sh"' in dockerfile
    arguments = ("--model-control-mode=explicit", "--load-model=ensemble", "--http-port=9")
    _, first, second = launch(tmp_path, "/my models", *arguments)
    for rank, line in enumerate((first, second)):
        assert line.startswith("tritonserver --model-repository=/my models ")
        assert f"shm-region-prefix-name=prefix{rank}_" in line
        assert "--disable-auto-complete-config" in line
        assert line.endswith("--http-port=9")
    # The other ranks load only the engine, whatever the first one loads.
    assert first.count("--load-model=") == second.count("--load-model=") == 1
    assert "--load-model=ensemble" in first
    assert "--model-control-mode=explicit --load-model=tensorrt_llm " in second
    assert second.count("--model-control-mode") == 1


@pytest.mark.parametrize("version", ["0.19.0", "1.2.1"])
def test_an_orchestrator_starts_the_others_itself(tmp_path: Path, version: str) -> None:
    options = {"multi_gpu": "orchestrator", "gpu_device_ids": "0;1"}
    model = build(tmp_path, version, **options)["tensorrt_llm"]
    # Every group of GPUs is an instance.
    assert model.parameters["gpu_device_ids"].string_value == "0;1"
    assert [group.count for group in model.instance_group] == [2]
    script = (tmp_path / version / "ensemble" / "launch.sh").read_text()
    assert "export TRTLLM_ORCHESTRATOR=1" in script
    assert "@" not in script.replace('"$@"', "")
    mpirun, server = launch(tmp_path, "/models", "--http-port=9")
    assert mpirun.count("tritonserver") == 1
    assert server.endswith("--http-port=9")
    flags = (
        "--pinned-memory-pool-byte-size=0", "--enable-peer-access=false",
        "--cuda-memory-pool-byte-size=0:0", "--cuda-memory-pool-byte-size=1:0",
    )  # fmt: skip
    assert all(flag in server for flag in flags)


def test_the_llm_api_on_several_gpus_is_started_by_mpirun(tmp_path: Path) -> None:
    build(tmp_path, "1.2.1", layout="llmapi", tensor_parallel=2)
    mpirun, server = launch(tmp_path, "/models")
    assert mpirun.startswith("mpirun --allow-run-as-root -n 1 tritonserver ")
    assert "--model-repository=/models" in server


@pytest.mark.parametrize("container", ["25.05", max(CONTAINERS)])
def test_the_triton_of_each_version_accepts_what_the_scripts_add(
    tmp_path: Path, container: str
) -> None:
    version = str(CONTAINERS[container])
    options = {"multi_gpu": "orchestrator", "gpu_device_ids": "0;1"}
    build(tmp_path, version, **options)
    triton = release(container)
    for line in launch(tmp_path, "/models", *closed(triton)):
        _, found, command = line.rpartition("tritonserver ")
        assert found
        assert triton.refused(command.split()) == []


def test_one_process_needs_no_script(tmp_path: Path) -> None:
    build(tmp_path, "1.2.1")
    assert not list(tmp_path.rglob("launch.sh"))


def commands(version: str, batching: str = "inflight", model: str = "llama", **options: Any) -> str:
    options = {**DEFAULTS, "max_batch_size": 8, "tensor_parallel": 2, **options}
    target = BuildTarget(
        Version.parse(version), options, batching, "max_utilization", streams=False
    )
    built = build_commands(target, Path("/my model"), model, Path("/engine"))
    return " && ".join(map(shlex.join, built))


@pytest.mark.parametrize(("version", "options", "expected"), cases("commands"))
def test_an_engine_is_built_by_the_tools_of_its_version(
    version: str, options: dict[str, Any], expected: str
) -> None:
    assert expected in commands(version, **{"examples": "ex", **options})


def test_a_static_engine_is_built_without_the_features_for_in_flight_batching() -> None:
    for version in ("0.5.0", "0.19.0"):
        assert "remove_input_padding" not in commands(version, "static")


@pytest.mark.parametrize(("version", "options", "message"), cases("refused commands"))
def test_engines_that_no_tool_can_build_are_refused(
    version: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LLMServeError, match=message):
        commands(version, **options)


def test_without_tensorrt_llm_the_exact_commands_are_reported(tmp_path: Path) -> None:
    engine = str(tmp_path / "engine")
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, "0.19.0", build_engine=True, engine=engine)
    text = str(caught.value)
    assert "25.05-trtllm-python-py3" in text
    assert f"trtllm-build --checkpoint_dir {engine}-checkpoint" in text
    assert "\n" not in text
    assert not (tmp_path / "0.19.0").exists()


def test_building_writes_a_log_and_reports_progress(tmp_path: Path) -> None:
    lines: list[str] = []
    log = tmp_path / "engine.log"
    run(["python3", "-c", "print('layer 1'); print('layer 2')"], log, lines.append)
    assert [line.partition(": ")[2] for line in lines[1:]] == ["layer 1", "layer 2"]
    assert "layer 1\nlayer 2\n" in log.read_text()
    with pytest.raises(ConfigError, match=r"returned 3.*see .*engine\.log"):
        run(["python3", "-c", "raise SystemExit(3)"], log, lines.append)
    with pytest.raises(ConfigError, match="cannot be run"):
        run(["no-such-tool"], log, lines.append)
