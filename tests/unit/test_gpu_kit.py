"""What `make gpu-bundle` and `make gpu` are made of; the whole runs in `make gpu-check`."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import requires
from pathlib import Path, PurePosixPath

import pytest

from plugins.tools.gpu import __main__ as kit
from plugins.tools.gpu import bundle, environment
from plugins.tools.gpu.requirements import closure
from plugins.tools.gpu.results import Results, markdown, read
from tests.support import install


def test_a_bundle_has_all_that_ours_need_and_neither_torch_nor_what_belongs_to_it() -> None:
    packed = bundle.needed("3.12")
    assert {"numpy", "grpcio", "ml-dtypes", "uvicorn", "starlette", "llguidance"} <= packed
    assert not packed & {"torch", "transformers", "tokenizers", "huggingface-hub", "scipy"}
    assert "exceptiongroup" in bundle.needed("3.10"), "what only that Python needs"


def test_requirements_are_followed_through_extras() -> None:
    assert requires("tritonclient")
    assert "grpcio" not in closure(["tritonclient"])
    assert "grpcio" in closure(["tritonclient[grpc]"])
    assert closure(["tritonclient[grpc]"], without=["tritonclient"]) == {"tritonclient"}


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        ("pytriton/tritonserver/bin/tritonserver", True),
        ("pytriton/tritonserver/python_backend_stubs/3.12/triton_python_backend_stub", True),
        ("pytriton/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub", False),
        ("pytriton/client/client.py", False),
        ("nvidia_pytriton.libs/libpython3-1.13.so.1.0", False),
        ("nvidia_pytriton.libs/libtritonserver-1.so", True),
        ("numpy/core/tests/test_api.py", False),
        ("numpy/core/numeric.pyi", False),
        # Read at run time: they list what a module loads lazily.
        ("llmserve/runtime/__init__.pyi", True),
        ("numpy/testing/__init__.py", True),
    ],
)
def test_what_only_other_versions_of_python_need_is_left_out(path: str, needed: bool) -> None:
    assert bundle._is_needed(PurePosixPath(path), "3.12") == needed


def test_the_machine_s_packages_are_linked_and_those_of_the_bundle_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, site = tmp_path / "machine", tmp_path / "site"
    for name in ("torch", "transformers", "numpy", "scipy"):
        install(machine, name, "", **{name: f"'of the machine: {name}'"})
        record = f"{name}.py,,\n{name}-1.2.dist-info/METADATA,,\n"
        (machine / f"{name}-1.2.dist-info" / "RECORD").write_text(record)
    needs = machine / "torch-1.2.dist-info" / "METADATA"
    needs.write_text(needs.read_text() + "Requires-Dist: numpy\n")
    install(site, "numpy", "", version="1.26.4", numpy="'of the bundle'")
    monkeypatch.setattr(sys, "path", [str(machine), *sys.path])
    environment.link(site)
    assert (site / "torch.py").is_symlink()
    assert (site / "transformers-1.2.dist-info").is_symlink()
    assert (site / "numpy.py").read_text() == "'of the bundle'"
    assert not (site / "numpy-1.2.dist-info").exists()
    assert not (site / "scipy.py").exists(), "nothing of ours needs it"


@pytest.mark.parametrize(("version", "message"), [("3.9", "is for Python 3.9"), ("", "no site")])
def test_a_bundle_that_does_not_fit_is_refused(tmp_path: Path, version: str, message: str) -> None:
    if version:
        (tmp_path / environment.ARCHIVE).touch()
        (tmp_path / environment.PYTHON).write_text(version)
    with pytest.raises(environment.SetupError, match=message):
        environment.create(tmp_path, tmp_path / "environment")


def test_what_a_part_found_before_it_was_ended_is_kept(tmp_path: Path) -> None:
    parts = tmp_path / "checkout" / "plugins" / "tools" / "gpu" / "parts"
    parts.mkdir(parents=True)
    for folder in (parts, parts.parent, parts.parent.parent):
        (folder / "__init__.py").touch()
    (parts / "slow.py").write_text(
        "import sys, time\n"
        "file = next(a[10:] for a in sys.argv if a.startswith('--results='))\n"
        """open(file, "w").write('{"what": "first", "values": {"n": "1"}}\\n')\n"""
        "time.sleep(60)\n"
    )
    (parts / "broken.py").write_text("raise SystemExit('no such device')")
    args = argparse.Namespace(device="cpu", quick=True, out=tmp_path)

    def outcome(name: str) -> tuple[list[str], str]:
        part = kit.Part(name, "", seconds=3)
        path = str(tmp_path / "checkout")
        rows, problem = kit.run(part, args, Path(sys.executable), path, tmp_path / name, 60)
        return [row.what for row in rows], problem

    assert outcome("slow") == (["first"], "it was ended after 3 s")
    assert outcome("broken") == ([], "it ended with 1: no such device")


def test_rows_become_tables_and_a_failure_does_not_end_a_part(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.jsonl")
    results.table("Rates")
    results.add("engine", True, **{"1": "50", "8": "200"})
    with results.attempt("other"):
        raise ValueError("out of\nmemory")
    results.add("engine", None, **{"8": "1 | 2"})
    assert markdown(read(tmp_path / "rows.jsonl")).splitlines() == [
        "",
        "### Rates",
        "",
        "| | 1 | 8 | failed | |",
        "|---|---|---|---|---|",
        "| engine | 50 | 200 |  | ok |",
        "| other |  |  | ValueError: out of memory | **no** |",
        "| engine |  | 1 \\| 2 |  |  |",
    ]


def test_no_part_begins_when_the_time_is_over(tmp_path: Path) -> None:
    args = argparse.Namespace(device="cpu", quick=True, out=tmp_path)
    part = kit.PARTS[0]
    assert kit.run(part, args, Path(os.devnull), "", tmp_path, 0) == ([], "no time was left")


def test_all_parts_together_end_in_time() -> None:
    assert sum(part.seconds for part in kit.PARTS) <= 20 * 60
