"""What goes wrong in a plugin's code is told with its plugin, its role and its component."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmserve.builder.build import build_spec
from llmserve.builder.plan import BuildSpec
from llmserve.plugin import BuildContext, PluginError, Tokenizer, hookimpl
from llmserve.registry import Plugin, Registry, find_plugins

ACME = """
from llmserve.plugin import Tokenizer, hookimpl

@hookimpl
def llmserve_register_tokenizers():
    return [Tokenizer(name="words", summary="", runtime="json:loads", prepare=prepare)]

def prepare(context):
    raise KeyError("vocab")
"""


def registry(prepare: Callable[[BuildContext], Any]) -> Registry:
    made = ModuleType("acme")

    @hookimpl
    def llmserve_register_tokenizers() -> list[Tokenizer]:
        return [Tokenizer(name="words", summary="", runtime="json:loads", prepare=prepare)]

    made.llmserve_register_tokenizers = llmserve_register_tokenizers  # type: ignore[attr-defined]
    return Registry([*find_plugins(), Plugin("acme", "llmserve", "1.0", module=made)])


def fails(context: BuildContext) -> dict[str, Any]:
    raise KeyError(context.name)


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (fails, "KeyError: 'words-model'"),
        (lambda context: None, "TypeError: it returned None instead of a mapping"),
        (lambda context: {"path": Path("x")}, "TypeError: Object of type .* is not JSON"),
    ],
)
def test_an_error_in_prepare_names_whose_it_is(
    prepare: Callable[[BuildContext], Any], why: str, tmp_path: Path
) -> None:
    spec = BuildSpec("hf", "demo", "words-model", tmp_path / "repository", tokenizer="words")
    with pytest.raises(PluginError) as caught:
        build_spec(spec, registry=registry(prepare))
    told = str(caught.value)
    assert told.startswith("prepare of tokenizer 'words' of plugin 'acme' (llmserve 1.0) failed: ")
    assert why.split(".*")[0] in told
    assert "\n" not in told
    assert not list((tmp_path / "repository").glob("words*"))


@pytest.mark.parametrize("traceback", ["", "1"])
def test_the_command_line_says_it_in_one_line_and_shows_where_to_who_asks(
    traceback: str, tmp_path: Path
) -> None:
    (tmp_path / "acme_module.py").write_text(ACME)
    home = tmp_path / "acme-1.2.dist-info"
    home.mkdir()
    (home / "METADATA").write_text("Name: acme\nVersion: 1.2\n")
    (home / "entry_points.txt").write_text("[llmserve.api2]\nacme = acme_module\n")
    command = [sys.executable, "-m", "llmserve_cli", "build", "--plugin", "hf", "--model", "demo"]
    done = subprocess.run(
        [*command, "--tokenizer", "words", "--output", str(tmp_path / "repository")],
        env={"PYTHONPATH": str(tmp_path), "LLMSERVE_TRACEBACK": traceback, "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    *above, last = done.stderr.splitlines()
    assert "prepare of tokenizer 'words' of plugin 'acme' (acme 1.2) failed: KeyError" in last
    assert "this is a bug" not in last
    assert any("in prepare" in line for line in above) == bool(traceback)
