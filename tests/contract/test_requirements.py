"""What a build records of the packages and modules that its components need."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from llmserve.builder.build import BuildSpec, build_spec
from llmserve.errors import PluginError
from llmserve.registry import Entry, Plugin, Registry
from llmserve.repository.runtimes import problem_with
from llmserve.roles import Formatter
from llmserve.runtime import contract

TEXT = "llmserve.runtime.text_formatter:TextFormatter"


def registry_with(runtime: str, requires: tuple[str, ...] = ()) -> Registry:
    """Everything that is installed, and a formatter from the distribution of hypothesis."""
    formatter = Formatter(
        name="other",
        summary="",
        runtime=runtime,
        requires=requires,
        inputs=contract.TEXT_FORMAT_INPUTS,
        outputs=(contract.TEXT_OUTPUT, contract.FINISH_REASON, *contract.USAGE),
    )
    plugin = Plugin("other", "hypothesis", version("hypothesis"), module=ModuleType("other"))
    registry = Registry.load()
    registry.entries.append(Entry(formatter, "formatter", plugin))
    return registry


def test_the_package_of_every_chosen_component_is_recorded(tmp_path: Path) -> None:
    spec = BuildSpec("hf", "demo", output=tmp_path / "repo", formatter="other")
    result = build_spec(spec, registry=registry_with(TEXT, requires=("Tritonclient",)))
    assert result.manifest.packages["hypothesis"] == version("hypothesis")
    text = (tmp_path / "repo" / "Dockerfile").read_text()
    assert f"hypothesis=={version('hypothesis')}" in text
    assert f"tritonclient=={version('tritonclient')}" in text
    assert "llmserve-hf==" in text


@pytest.mark.parametrize("required", ["tokenizers>=0.20", "torch[cpu]", "", "a b", "acme @ x"])
def test_a_requirement_that_is_no_name_is_told(tmp_path: Path, required: str) -> None:
    spec = BuildSpec("hf", "demo", output=tmp_path / "repo", formatter="other")
    with pytest.raises(PluginError, match="which is no distribution's name: ranges and extras"):
        build_spec(spec, registry=registry_with(TEXT, requires=("numpy", required)))


@pytest.mark.parametrize("runtime", ["nor.x:Y", "llmserve.nowhere:Y", "json.decoder.x:Y", "json"])
def test_a_runtime_that_cannot_be_found_is_told_at_build_time(tmp_path: Path, runtime: str) -> None:
    spec = BuildSpec("hf", "demo", output=tmp_path / "repo", formatter="other")
    with pytest.raises(PluginError, match=r"formatter 'other' of plugin .* cannot be run"):
        build_spec(spec, registry=registry_with(runtime))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("runtime", ["", ":", "a:", ":b", "a b:c", "a..b:c", "a:b:c", "a.b:c.d"])
def test_what_names_no_class_is_told(runtime: str) -> None:
    assert "not of the form" in str(problem_with(runtime))


def test_looking_for_a_module_does_not_import_it(tmp_path: Path) -> None:
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "part.py").write_text("raise SystemExit('it was imported')")
    code = (
        "from llmserve.repository.runtimes import problem_with\n"
        "assert problem_with('heavy.part:X') is None\n"
        "assert problem_with('heavy.other:X') == 'there is no module heavy.other'"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_package_that_extends_its_path_when_imported_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "part.py").write_text("")
    (tmp_path / "stretched").mkdir()
    (tmp_path / "stretched" / "__init__.py").write_text(
        f"__path__.append({str(tmp_path / 'elsewhere')!r})"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert problem_with("stretched.part:X") is None
