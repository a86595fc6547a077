"""A machine's shortages are reported before anything starts; the tests fake its files."""

from __future__ import annotations

import fcntl
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

import llmserve
from llmserve.builder.weights.stored import read_stored
from llmserve.contract.serve_options import Runtime
from llmserve.repository.repository import Model
from llmserve.server import ServerSettings
from llmserve.server.run import machine
from llmserve.server.run.guard import LOCK
from llmserve.server.run.process import sweep
from llmserve.server.startup import settings_of_each

PLENTY = {
    "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n",
    "sys/fs/cgroup/memory.max": "max\n",
    "sys/fs/cgroup/memory.current": "1\n",
    "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
    "sys/fs/cgroup/pids.max": "max\n",
    "sys/fs/cgroup/pids.current": "7\n",
}
CONFIG = 'backend: "python" instance_group { count: 2 }'


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    for name in ("one", "other"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(CONFIG)
    return ServerSettings(tmp_path / "models", "embedded")


def root_with(folder: Path, **changes: str) -> Path:
    files = PLENTY | {name.replace("__", "/").replace("_DOT_", "."): text
                      for name, text in changes.items()}  # fmt: skip
    for name, text in files.items():
        path = folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "root"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, None),
        ({"sys__fs__cgroup__pids_DOT_max": "50"}, r"43 more processes .* needs 132: ulimit -u"),
        ({"proc__meminfo": "MemTotal: 102400 kB\nMemAvailable: 90000 kB"},
         "there are 100 MB of memory in all, and the models need 160: serve fewer"),
        ({"sys__fs__cgroup__memory_DOT_max": str(50 << 20)},
         "there are 50 MB of memory in all, and the models need 160"),
    ],
)  # fmt: skip
def test_a_shortage_that_would_make_a_server_fail_is_an_error(
    settings: ServerSettings, tmp_path: Path, files: dict[str, str], message: str | None
) -> None:
    shortages = machine.shortages(settings, root_with(tmp_path, **files))
    if message is None:
        assert shortages == []
    else:
        with pytest.raises(llmserve.errors.ServerError, match=message):
            raise shortages[0].error()
        assert len(shortages) == 1


def test_few_open_files(
    settings: ServerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    (problem, *_) = machine.shortages(settings, root_with(tmp_path))
    assert "64 files may be open at once, and a server of these models needs 128" in str(problem)


def test_replicas_need_more_and_share_the_machine(
    settings: ServerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    replicated = replace(settings, replicas=3, log_file=tmp_path / "triton.log")
    root = root_with(tmp_path, proc__meminfo="MemTotal: 409600 kB\nMemAvailable: 409600 kB")
    (problem,) = machine.shortages(replicated, root)
    assert "400 MB of memory in all, and the models need 480" in str(problem)
    replicas = settings_of_each(replicated)
    assert [replica.grpc_port for replica in replicas] == [settings.grpc_port, 0, 0]
    assert [replica.log_file and replica.log_file.stem for replica in replicas] == [
        "triton", "triton-2", "triton-3",
    ]  # fmt: skip
    assert [replica.env["OMP_NUM_THREADS"] for replica in replicas] == ["2"] * 3
    assert [replica.env["CUDA_VISIBLE_DEVICES"] for replica in replicas] == ["4", "GPU-7", "4"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in settings_of_each(replicated)[0].env
    assert settings_of_each(settings) == [settings]


def test_memory_that_others_use_is_worth_a_note(settings: ServerSettings, tmp_path: Path) -> None:
    root = root_with(tmp_path, proc__meminfo="MemTotal: 900000 kB\nMemAvailable: 102400 kB")
    assert machine.shortages(settings, root) == []
    assert machine.note_of_memory(settings, root) == (
        "the models need 160 MB of memory or more (one 80), and 100 are free: serve fewer "
        "with --model"
    )
    # The file cache can be reclaimed.
    root = root_with(
        tmp_path,
        sys__fs__cgroup__memory_DOT_max=str(400 << 20),
        sys__fs__cgroup__memory_DOT_current=str(390 << 20),
        sys__fs__cgroup__memory_DOT_stat=f"inactive_file {200 << 20}",
    )
    assert machine.note_of_memory(settings, root) is None


def test_weights_count_as_they_are_loaded(tmp_path: Path) -> None:
    """The demo model is stored in float16: as float32 it takes twice as much."""
    sizes = []
    for name, dtype in (("whole", "float32"), ("half", "bfloat16")):
        llmserve.build("hf", "demo", output=tmp_path, name=name, dtype=dtype)
        size = machine.expected_memory(Model(tmp_path / name))
        sizes.append(size - machine._MEMORY_OF_PROCESS - machine._MEMORY_OF_ENGINE)
    stored = read_stored(tmp_path / "whole" / "1" / "model" / "model.safetensors").values()
    on_disk = sum(tensor.end - tensor.begin for tensor in stored)
    assert sizes == [2 * on_disk, on_disk]


GRAPH = 'backend: "onnxruntime" instance_group { count: 2 kind: KIND_CPU }'


@pytest.mark.parametrize(("runtime", "threads"), [("binary", 200), ("embedded", 216)])
def test_what_triton_itself_runs_takes_its_files_and_no_process(
    tmp_path: Path, runtime: Runtime, threads: int
) -> None:
    for version, size in (("9", 1 << 20), ("10", 3 << 20)):
        (tmp_path / "models" / "graph" / version).mkdir(parents=True)
        (tmp_path / "models" / "graph" / version / "model.onnx").write_bytes(bytes(size))
    (tmp_path / "models" / "graph" / "config.pbtxt").write_text(GRAPH)
    settings = ServerSettings(tmp_path / "models", runtime, replicas=2)
    assert machine.expected_memory(settings.opened.model("graph")) == 3 << 20
    root = root_with(
        tmp_path, proc__meminfo="MemTotal: 5120 kB\nMemAvailable: 5120 kB",
        sys__fs__cgroup__pids_DOT_max="8",
    )  # fmt: skip
    processes, memory = machine.shortages(settings, root)
    assert f"a server of these models needs {threads}" in str(processes)
    assert "there are 5 MB of memory in all, and the models need 6" in str(memory)


@pytest.mark.parametrize(
    ("kind", "manifest", "size"),
    [("KIND_CPU", "ours", 1000), ("KIND_CPU", None, 0), ("KIND_GPU", "ours", 0)],
)
def test_weights_that_may_be_on_a_gpu_take_no_memory_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, manifest: str | None, size: int
) -> None:
    (tmp_path / "graph" / "1").mkdir(parents=True)
    (tmp_path / "graph" / "1" / "model.onnx").write_bytes(bytes(1000))
    config = f'backend: "onnxruntime" instance_group {{ kind: {kind} }}'
    (tmp_path / "graph" / "config.pbtxt").write_text(config)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path == Path("/dev/nvidiactl") or exists(path))
    monkeypatch.setattr(Model, "manifest", manifest)
    assert machine.expected_memory(Model(tmp_path / "graph")) == size


def test_the_leftovers_of_killed_servers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, alive, new, lockless = (f"llmserve-{digit * 12}" for digit in "abcd")
    for name in (dead, alive, new):
        (tmp_path / f"{name}-x").mkdir()
        (tmp_path / f"{name}-x" / LOCK).touch()
        if name != new:
            os.utime(tmp_path / f"{name}-x" / LOCK, (1, 1))
    (tmp_path / f"{lockless}-x").mkdir()
    segment = Path("/dev/shm", f"{dead}-of-a-test")
    segment.touch()
    with (tmp_path / f"{alive}-x" / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep()
        assert {path.name[9] for path in tmp_path.iterdir()} == {"b", "c", "d"}
        assert not segment.exists()


def test_what_is_guessed_of_the_memory_of_others_models_is_said(settings: ServerSettings) -> None:
    (settings.repository / "one/1").mkdir()
    (settings.repository / "one/1/weights.bin").write_bytes(bytes(10_000_000))
    note = machine.note_of_guesses(replace(settings, models=("one",)))
    assert note is not None
    least = machine.expected_memory(settings.opened.model("other"))
    assert f"(one {(least + 2 * 10_000_000) / 1e6:.0f} MB)" in note
    (settings.repository / "one/config.pbtxt").write_text('backend: "onnxruntime"')
    assert machine.note_of_guesses(replace(settings, models=("one",))) is None
