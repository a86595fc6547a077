"""What is put on a command line, and which runtime is chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmserve.errors import ServerError, UsageError
from llmserve.roles import Backend
from llmserve.server import ServerSettings, embedded, find_problems, first_available
from llmserve.server.launch import (
    Instance,
    docker_arguments,
    inherited_environment,
    link_models,
    new_key,
    server_command,
    triton_args,
)
from llmserve.server.settings import Ports


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(
        Ports("127.0.0.1", 1, 2, 3), tmp_path / "scratch", "llmserve-test", key="sesame"
    )


def guarded(arguments: tuple[str, ...]) -> list[str]:
    return [argument for argument in arguments if argument.endswith(":llmserve-key=sesame")]


def test_what_writes_is_always_behind_the_key(instance: Instance) -> None:
    arguments = triton_args(ServerSettings(Path("m")), instance)
    assert len(guarded(arguments)) == 2
    for argument in guarded(arguments):
        assert "shared-memory,trace,logging" in argument
        assert "model-repository" not in argument, "clients may ask which models there are"
    assert "--model-control-mode=explicit" not in arguments


def test_where_models_can_be_loaded_that_is_behind_the_key(instance: Instance) -> None:
    settings = ServerSettings(Path("m"), explicit=True, models=("a", "b"))
    arguments = triton_args(settings, instance)
    assert all("model-repository" in argument for argument in guarded(arguments))
    loaded = [argument for argument in arguments if argument.startswith("--load-model")]
    assert loaded == [f"--load-model={name}" for name in settings.models]


def test_a_server_that_loads_no_model_on_request_has_a_key_that_nobody_can_send(
    instance: Instance,
) -> None:
    arguments = triton_args(ServerSettings(Path("m"), models=("a",)), instance)
    assert not [argument for argument in arguments if "control-mode" in argument]
    assert "\n" in new_key(explicit=False)
    assert new_key(explicit=True).isprintable()
    assert new_key(explicit=True) != new_key(explicit=True)


def test_chosen_models_are_all_that_the_server_sees(tmp_path: Path) -> None:
    repository, scratch = tmp_path / "a b;é", tmp_path / "scratch"
    for name in ("one", "two", "three"):
        (repository / name).mkdir(parents=True)
    scratch.mkdir()
    folder = link_models(ServerSettings(repository, models=("one", "two")), scratch)
    assert {path.name for path in folder.iterdir()} == {"one", "two"}
    assert folder.parent == scratch
    (tmp_path / "other").mkdir()
    folder = link_models(ServerSettings(repository), tmp_path / "other")
    assert {path.name for path in folder.iterdir()} == {"one", "two", "three"}
    assert folder.parent == tmp_path / "other"


def test_a_container_sees_chosen_models_alone(instance: Instance, tmp_path: Path) -> None:
    settings = ServerSettings(tmp_path / 'a,"b', models=("one",), mounts=(Path("/data"),))
    mounts = [a for a in docker_arguments(settings, instance, gpus=False) if "--mount" in a]
    assert mounts[:2] == [
        f'--mount=type=bind,"source={tmp_path}/a,""b/one",target=/models/one,readonly',
        "--mount=type=bind,source=/data,target=/data,readonly",
    ]


def test_a_container_is_told_where_and_never_the_token(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    settings = ServerSettings(tmp_path, image="triton:test", extra_args=("--log-verbose=1",))
    arguments = docker_arguments(settings, instance, gpus=False)
    image = arguments.index("triton:test")
    before, inside = arguments[:image], arguments[image + 1 :]
    assert "--env=HF_TOKEN" in before
    assert "hf_secret" not in " ".join(arguments)
    assert "--env=HF_HUB_OFFLINE" not in before
    assert [a for a in before if a.startswith("--publish")] == [
        "--publish=127.0.0.1:1:8000",
        "--publish=127.0.0.1:2:8001",
        "--publish=127.0.0.1:3:8002",
    ]
    assert f"--mount=type=bind,source={tmp_path},target=/models,readonly" in before
    assert f"--mount=type=bind,source={tmp_path},target=/hf" in before
    assert "--gpus=all" not in before
    assert inside[0] == "tritonserver"
    assert {"--model-repository=/models", "--http-port=8000"} <= set(inside)
    assert inside[-1] == "--log-verbose=1"
    assert "--gpus=all" in docker_arguments(settings, instance, gpus=True)


def test_auto_takes_a_server_on_path_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "tritonserver"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert first_available() == "binary"


def test_where_there_is_none_all_three_ways_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    monkeypatch.setattr("llmserve.server.launch._USUAL", tmp_path / "nothing")
    with pytest.raises(ServerError) as none:
        first_available()
    for words in ("binary: no tritonserver", "embedded: ", "docker: no docker command"):
        assert words in none.value.problem


def test_what_the_embedded_server_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"numpy": "2.1.0"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: None)
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    with pytest.raises(ServerError, match=r"numpy < 2 and this is 2\.1\.0: pip install"):
        embedded.find_embedded()


def test_python_path_is_absolute_for_a_server_in_another_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", "/lib"]))
    expected = os.pathsep.join([str(Path("src").absolute()), "/lib"])
    assert inherited_environment()["PYTHONPATH"] == expected


def test_a_model_of_several_processes_brings_how_it_is_started(
    tmp_path: Path, instance: Instance
) -> None:
    settings = ServerSettings(tmp_path)
    command = server_command(settings, "tritonserver", ("--id=x",), repository="/models")
    assert command == ("tritonserver", "--model-repository=/models", "--id=x")
    for name in ("llama", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "llama" / "launch.sh").touch()
    command = server_command(settings, "tritonserver", ("--id=x",), repository="/models")
    assert command == ("sh", "/models/llama/launch.sh", "/models", "--id=x")
    assert "sh" in docker_arguments(settings, instance, gpus=False)
    (tmp_path / "other" / "launch.sh").touch()
    with pytest.raises(ServerError, match="llama and other each start a server"):
        server_command(settings, "tritonserver", (), repository="/models")
    one = ServerSettings(tmp_path, models=("other",))
    assert server_command(one, "tritonserver", (), repository="/m")[1] == "/m/other/launch.sh"


def test_registered_backends_are_linked_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acme = Backend(name="acme", summary="", folder=tmp_path / "plugin" / "triton")
    acme.folder.mkdir(parents=True)
    (acme.folder / "model.py").touch()
    library = tmp_path / "libpython.so"
    library.touch()
    bundled = tmp_path / "home" / "backends" / "python" / "libtriton_python.so"
    bundled.parent.mkdir(parents=True)
    bundled.touch()
    monkeypatch.setattr(embedded, "_libpython", lambda: library)
    backends, libraries = embedded.lay_out(tmp_path / "home", tmp_path / "scratch", [acme])
    assert {path.name for path in backends.iterdir()} == {"python", "acme"}
    assert (backends / "acme" / "model.py").is_file()
    # Triton follows no link out of the folder for the library that such a backend runs.
    assert not (backends / "python" / "libtriton_python.so").is_symlink()
    assert sorted(path.name for path in libraries.iterdir()) == [
        "libpython.so",
        "nvidia_pytriton.libs",
    ]


def test_importing_it_loads_nothing_heavy() -> None:
    program = "import sys, llmserve.server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    heavy = {"numpy", "torch", "tritonclient", "click", "pytriton", "http.client"}
    assert done.returncode == 0, done.stderr
    assert not heavy & set(done.stdout.split())


def test_waiting_threads_spin_briefly_unless_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert int(embedded.environment(tmp_path, tmp_path)["GOMP_SPINCOUNT"]) > 0
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert embedded.environment(tmp_path, tmp_path)["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "GOMP_SPINCOUNT" not in embedded.environment(tmp_path, tmp_path)


def test_memory_stays_with_the_process_unless_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*os.environ]:
        if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES":
            monkeypatch.delenv(name)
    usual = embedded.environment(tmp_path, tmp_path)
    assert usual["ORT_DISABLE_TELEMETRY"] == "1"
    assert int(usual["MALLOC_TRIM_THRESHOLD_"]) > int(usual["MALLOC_MMAP_THRESHOLD_"]) > 0
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        with monkeypatch.context() as only:
            only.setenv(name, "1")
            asked = embedded.environment(tmp_path, tmp_path)
        assert asked[name] == "1"
        assert "MALLOC_MMAP_THRESHOLD_" not in asked


@pytest.mark.parametrize("log", ["/dev/full", "gone/triton.log", "."])
def test_a_log_that_cannot_be_read_again_is_refused(tmp_path: Path, log: str) -> None:
    """The log is what says why a server does not start."""
    (problem,) = find_problems(ServerSettings(tmp_path, log_file=tmp_path / log))
    assert isinstance(problem, UsageError)
    assert f"cannot write the log to {tmp_path / log}" in problem.problem
    assert find_problems(ServerSettings(tmp_path, log_file=tmp_path / "triton.log")) == []
    assert not list(tmp_path.iterdir())
