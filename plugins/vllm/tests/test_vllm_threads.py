"""With how many threads a model in vLLM computes on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from llmserve_vllm import threads
from llmserve_vllm.generator import VllmGenerator

Machine = Callable[..., dict[str, str]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return the variables on a machine with these cores, each with so many hyperthreads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def variables(
        cores: int, hyperthreads: int = 1, *, vllm: str | None = "0.32.0+cpu", **chosen: str
    ) -> dict[str, str]:
        for cpu in range(cores * hyperthreads):
            folder = tmp_path / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text("0\n", encoding="ascii")
            (folder / "core_id").write_text(f"{cpu % cores}\n", encoding="ascii")

        def version(name: str) -> str:
            assert name == "vllm"
            if vllm is None:
                raise PackageNotFoundError
            return vllm

        monkeypatch.setattr(threads, "_CPUS", tmp_path)
        monkeypatch.setattr(threads, "version", version)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores * hyperthreads)))
        for name, value in chosen.items():
            monkeypatch.setenv(name, value)
        return dict(VllmGenerator.environment({}, tmp_path))

    return variables


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (3, "2"), (16, "15")])
def test_a_core_is_left_to_the_server(machine: Machine, cores: int, threads: str) -> None:
    assert machine(cores) == {"OMP_NUM_THREADS": threads}


def test_hyperthreads_are_no_cores(machine: Machine) -> None:
    assert machine(4, 2) == {"OMP_NUM_THREADS": "3"}


def test_vllms_own_variable_says_how_many_cores_are_left(machine: Machine) -> None:
    assert machine(8, VLLM_CPU_NUM_OF_RESERVED_CPU="3") == {"OMP_NUM_THREADS": "5"}


@pytest.mark.parametrize("vllm", ["0.32.0", "0.32.0+cu130", None])
def test_a_vllm_for_gpus_keeps_its_own_number(machine: Machine, vllm: str | None) -> None:
    assert machine(8, vllm=vllm) == {}


def test_a_number_that_somebody_has_chosen_stays(machine: Machine) -> None:
    assert machine(8, OMP_NUM_THREADS="8") == {}


def test_a_machine_that_does_not_tell_its_cores_counts_its_processors(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(2)
    monkeypatch.setattr(threads, "_CPUS", tmp_path / "absent")
    assert threads.variables() == {"OMP_NUM_THREADS": "1"}
