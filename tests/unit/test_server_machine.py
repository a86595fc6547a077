"""What a machine is short of is said before anything starts; its files are the tests' own."""

from __future__ import annotations

import fcntl
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

import llmserve
from llmserve.server import ServerSettings, machine, settings_of_each
from llmserve.server.guard import LOCK
from llmserve.server.process import sweep

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
    ("files", "told"),
    [
        ({}, None),
        ({"sys__fs__cgroup__pids_DOT_max": "50"}, r"43 more processes .* needs 132: ulimit -u"),
        ({"proc__meminfo": "MemTotal: 102400 kB\nMemAvailable: 90000 kB"},
         "there are 100 MB of memory in all, and the models need 160: serve fewer"),
        ({"sys__fs__cgroup__memory_DOT_max": str(50 << 20)},
         "there are 50 MB of memory in all, and the models need 160"),
    ],
)  # fmt: skip
def test_what_a_server_would_fail_for_want_of(
    settings: ServerSettings, tmp_path: Path, files: dict[str, str], told: str | None
) -> None:
    found = machine.shortages(settings, root_with(tmp_path, **files))
    if told is None:
        assert found == []
    else:
        with pytest.raises(llmserve.errors.ServerError, match=told):
            raise found[0]
        assert len(found) == 1


def test_few_open_files(
    settings: ServerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    (problem, *_) = machine.shortages(settings, root_with(tmp_path))
    assert "64 files may be open at a time, and a server of these models needs 128" in str(problem)


def test_replicas_need_more_and_share_what_there_is(
    settings: ServerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    asked = replace(settings, replicas=3, log_file=tmp_path / "triton.log")
    root = root_with(tmp_path, proc__meminfo="MemTotal: 409600 kB\nMemAvailable: 409600 kB")
    (problem,) = machine.shortages(asked, root)
    assert "400 MB of memory in all, and the models need 480" in str(problem)
    each = settings_of_each(asked)
    assert [one.grpc_port for one in each] == [settings.grpc_port, 0, 0]
    assert [one.log_file and one.log_file.stem for one in each] == [
        "triton", "triton-2", "triton-3",
    ]  # fmt: skip
    assert [one.env["OMP_NUM_THREADS"] for one in each] == ["2"] * 3
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in each] == ["4", "GPU-7", "4"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in settings_of_each(asked)[0].env
    assert settings_of_each(settings) == [settings]


def test_memory_that_others_hold_is_worth_a_note(settings: ServerSettings, tmp_path: Path) -> None:
    root = root_with(tmp_path, proc__meminfo="MemTotal: 900000 kB\nMemAvailable: 102400 kB")
    assert machine.shortages(settings, root) == []
    assert machine.note_of_memory(settings, root) == (
        "the models need 160 MB of memory or more (one 80), and 100 are free: serve fewer "
        "with --model"
    )
    # What was read from files can be had again.
    root = root_with(
        tmp_path,
        sys__fs__cgroup__memory_DOT_max=str(400 << 20),
        sys__fs__cgroup__memory_DOT_current=str(390 << 20),
        sys__fs__cgroup__memory_DOT_stat=f"inactive_file {200 << 20}",
    )
    assert machine.note_of_memory(settings, root) is None


def test_weights_count_as_they_are_loaded(tmp_path: Path) -> None:
    """The demo model is stored in float32: as bfloat16 it takes half."""
    sizes = []
    for name, dtype in (("whole", "float32"), ("half", "bfloat16")):
        llmserve.build("hf", "demo", output=tmp_path, name=name, dtype=dtype)
        (one,) = machine._memory_of_models(ServerSettings(tmp_path, models=(name,)))[name]
        sizes.append(one - machine._MEMORY_OF_PROCESS - machine._MEMORY_OF_ENGINE)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "whole" / "1" / "model").iterdir())
    assert sizes == [on_disk, on_disk // 2]


def test_what_is_left_of_servers_that_were_killed_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, alive, new, none = (f"llmserve-{digit * 12}" for digit in "abcd")
    for name in (dead, alive, new):
        (tmp_path / f"{name}-x").mkdir()
        (tmp_path / f"{name}-x" / LOCK).touch()
        if name != new:
            os.utime(tmp_path / f"{name}-x" / LOCK, (1, 1))
    (tmp_path / f"{none}-x").mkdir()
    segment = Path("/dev/shm", f"{dead}-of-a-test")
    segment.touch()
    with (tmp_path / f"{alive}-x" / LOCK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        sweep()
        assert {path.name[9] for path in tmp_path.iterdir()} == {"b", "c", "d"}
        assert not segment.exists()
