from __future__ import annotations

from pathlib import Path

from llmserve.measure.machine import machine


def test_a_machine_is_told_by_its_processor_and_its_devices(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: ACME  9000\nflags\t: a:b\n")
    for at in range(2):
        folder = tmp_path / "driver/nvidia/gpus" / f"0000:0{at}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    told = machine(tmp_path)
    assert told["cpu"] == "ACME 9000"
    assert told["gpu"] == "NVIDIA H200 and NVIDIA H200"
    assert int(told["cores"]) > 0


def test_what_a_system_does_not_tell_is_left_out(tmp_path: Path) -> None:
    told = machine(tmp_path)
    assert not told.keys() & {"cpu", "gpu"}
    assert told.keys() >= {"cores", "architecture", "system", "python", "llmserve"}
