"""What a machine has is read from its files: tests write such files, and one makes a real group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path

import pytest

from llmserve.hardware import MachineMemory, MemoryKills, computes_in, gpu_memory, memory

MEMINFO = "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n"


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine_without_limits_has_what_it_has(tmp_path: Path) -> None:
    assert memory(tmp_path) == MachineMemory(inf, inf)
    assert memory(write(tmp_path, proc__meminfo=MEMINFO)) == MachineMemory(8e6 * 1024, 16e6 * 1024)


@pytest.mark.parametrize("inside", ["", "/service"])
def test_the_limit_of_a_group_above_counts(tmp_path: Path, inside: str) -> None:
    root = write(
        tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup=f"0::/user{inside}\n",
        sys__fs__cgroup__user__memory_DOT_max="3000000",
        sys__fs__cgroup__user__memory_DOT_current="1000000",
        sys__fs__cgroup__user__memory_DOT_stat="anon 1\ninactive_file 200000\nactive_file 300000",
        sys__fs__cgroup__user__service__memory_DOT_max="max",
    )  # fmt: skip
    assert memory(root) == MachineMemory(2_500_000, 3_000_000)


def test_groups_of_the_first_version_count(tmp_path: Path) -> None:
    root = write(
        tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="5:cpu:/\n4:memory:/mine\n0::/\n",
        sys__fs__cgroup__memory__mine__memory_DOT_limit_in_bytes="3000000",
        sys__fs__cgroup__memory__mine__memory_DOT_usage_in_bytes="3100000",
        sys__fs__cgroup__memory__mine__memory_DOT_stat="total_inactive_file 0",
    )  # fmt: skip
    assert memory(root) == MachineMemory(0, 3_000_000)
    stat = "active_file 9\ntotal_inactive_file 400000\ntotal_active_file 500000"
    write(root, sys__fs__cgroup__memory__mine__memory_DOT_stat=stat)
    assert memory(root) == MachineMemory(800_000, 3_000_000)


def test_kills_are_counted_where_they_are_told(tmp_path: Path) -> None:
    root = write(
        tmp_path, proc__vmstat="oom_kill 3\n", proc__self__cgroup="0::/mine\n",
        sys__fs__cgroup__mine__memory_DOT_max="max",
        sys__fs__cgroup__mine__memory_DOT_events="low 0\noom_kill 1\n",
    )  # fmt: skip
    kills = MemoryKills(root)
    assert not kills.happened()
    (root / "sys/fs/cgroup/mine/memory.events").write_text("low 0\noom_kill 2\n")
    assert kills.happened()


def test_instructions_are_those_of_the_processor(tmp_path: Path) -> None:
    root = write(tmp_path, proc__cpuinfo="processor: 0\nflags\t\t: fpu avx512f avx512_bf16\n")
    assert computes_in("bfloat16", root)
    assert not computes_in("float16", root)
    assert not computes_in("float32", root)
    assert not computes_in("bfloat16", tmp_path / "nothing")


def test_each_gpu_has_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '1000, 24000'\necho '20000, 24000'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    sizes = [(1000 << 20, 24000 << 20), (20000 << 20, 24000 << 20)]
    assert gpu_memory() == [MachineMemory(*each) for each in sizes]
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert gpu_memory() == []


@pytest.fixture
def group() -> Iterator[Path]:
    """Return a real group of processes, if this machine lets one be made."""
    lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    mine = [line.split(":")[2].strip("/") for line in lines if ":memory:" in line]
    above = Path("/sys/fs/cgroup/memory", mine[0]) if mine else None
    folder = above / f"llmserve-{os.getpid()}" if above and above.is_dir() else None
    try:
        if folder is None:
            raise OSError
        folder.mkdir()
    except OSError:
        pytest.skip("no group with a limit can be made here")
    yield folder
    with suppress(OSError):
        folder.rmdir()


def test_a_real_limit_is_seen_and_a_real_kill_is_named(group: Path) -> None:
    limit = 200 << 20
    (group / "memory.limit_in_bytes").write_text(str(limit))
    script = """
import os, signal, sys, subprocess
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from llmserve.hardware import MemoryKills, memory
print(int(memory().total), memory().free <= memory().total)
kills = MemoryKills()
print(kills.happened())
run = subprocess.run([sys.executable, "-c", "x = bytearray(b'1') * (400 << 20)"])
print(run.returncode == -signal.SIGKILL, kills.happened())
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(group)], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == [f"{limit} True", "False", "True True"]
