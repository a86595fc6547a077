"""`llmserve check` finds what would not load, and says it in plain words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import llmserve
from llmserve.plugin import CheckedModel, hookimpl
from llmserve.registry import Plugin, Registry, find_plugins
from llmserve.repository import config as modelconfig
from llmserve.repository.check import check_repository
from tests.support import replace_text


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    llmserve.build("hf", "demo", output=tmp_path / "repo")
    return tmp_path / "repo"


CONFIG, MANIFEST = "config.pbtxt", "llmserve.json"
SIZE, SIZE_9 = "max_batch_size: 8", "max_batch_size: 9"
INSTALLED = "where it is installed"
WHOLE = "in a whole check"


@pytest.mark.parametrize(
    ("file", "old", "new", "message", "only"),
    [
        (CONFIG, SIZE, "max_batch_size: ${size}", r"\$\{size\} in line 2", ()),
        (CONFIG, SIZE, "max_batch_sice: 8", "max_batch_sice", ()),
        (CONFIG, SIZE, "max_batch_size: 0", "needs a batch dimension", ()),
        (CONFIG, 'name: "demo"', 'name: "other"', "called 'other'", ()),
        (CONFIG, 'name: "top_k"', 'name: "top_p"', "top_p is declared twice", ()),
        (CONFIG, "", None, r"config\.pbtxt is missing", ()),
        ("1/model.py", "", None, r"1/model\.py is missing", ()),
        ("1/model.py", "", "def (", "is no Python", ()),
        ("1/model/model.safetensors", "", None, r"model\.safetensors is missing", ()),
        ("1", "", "one", "no version folder", ()),
        ("../notes/x", "", "", "notes: it is no model", (WHOLE,)),
        (MANIFEST, "", None, r"llmserve\.json is missing", ()),
        (MANIFEST, "", "{}", "is damaged", ()),
        (MANIFEST, '"settings": {}', '"setting": {}', "is damaged", ()),
        (MANIFEST, '"formatter": {', '"farmatter": {', "names no formatter", ()),
        (MANIFEST, '"torch": ', '"no-such-package": ', "no-such-package", (INSTALLED,)),
        (MANIFEST, "llmserve_hf.generator:", "llmserve_hf.gone:", "no module", (INSTALLED,)),
        (MANIFEST, "generator:TransformersGenerator", "generator", "of the form", (INSTALLED,)),
        (MANIFEST, "hf_tokenizer:TransformersTokenizer", "batch:BatchDriver",
         "BatchDriver has no method encode or encode_chat or decode", (INSTALLED, WHOLE)),
    ],
)  # fmt: skip
def test_what_would_not_load_is_found(
    repo: Path, file: str, old: str, new: str | None, message: str, only: tuple[str, ...]
) -> None:
    def found(**how: Any) -> bool:
        fatal = [problem for problem in check_repository(repo, **how) if problem.fatal]
        return any(re.search(message, str(problem)) for problem in fatal)

    assert check_repository(repo) == []
    path = repo / "demo" / file
    if new is None:
        path.unlink()
    elif path.is_dir():
        path.rename(path.with_name(new))
    elif old:
        replace_text(path, old, new)
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text(new)
    assert found()
    assert found(quick=True, models=["demo"]) == (WHOLE not in only)
    assert found(served_here=False) == (INSTALLED not in only)


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("config.pbtxt", "config.pbtxt is missing"),
        ("1/model.py", "1/model.py is missing"),
        ("1/model/model.safetensors", "1/model/model.safetensors is missing"),
        ("1/model", "1/model/config.json and 2 more are missing"),
    ],
)
def test_what_is_missing_is_told_once(repo: Path, file: str, told: str) -> None:
    (repo / "demo" / file).rename(repo.parent / "moved")
    assert [problem.what for problem in check_repository(repo)] == [told]


QUICK = """
import sys, time
from pathlib import Path
began = time.process_time()
from llmserve.repository.check import check_repository
assert check_repository(Path(sys.argv[1]), quick=True) == []
assert time.process_time() - began < 1, time.process_time() - began
assert not {"torch", "transformers"} & sys.modules.keys()
"""


def test_a_quick_check_takes_less_than_a_second_and_loads_nothing_heavy(repo: Path) -> None:
    subprocess.run([sys.executable, "-c", QUICK, str(repo)], check=True)


@pytest.mark.parametrize("raises", [True, False])
def test_a_check_of_a_plugin_that_fails_hides_no_other(repo: Path, raises: bool) -> None:
    made = ModuleType("acme")

    @hookimpl
    def llmserve_check_model(model: CheckedModel) -> list[Any]:
        if raises:
            raise ZeroDivisionError(model.name)
        return ["not a problem"]

    made.llmserve_check_model = llmserve_check_model  # type: ignore[attr-defined]
    registry = Registry([*find_plugins(), Plugin("acme", "llmserve-acme", "1.0", module=made)])
    (repo / "demo" / "1" / "model.py").unlink()
    told = "\n".join(str(problem) for problem in check_repository(repo, registry))
    why = "ZeroDivisionError" if raises else "TypeError: it returned 'not a problem'"
    assert f"check of plugin 'acme' (llmserve-acme 1.0) failed: {why}" in told
    assert "1/model.py is missing" in told


@pytest.mark.parametrize(
    ("file", "old", "new", "note"),
    [
        ("client.py", "import ", "import  ", "client.py was changed"),
        (MANIFEST, '"name": "demo"', '"name": "other"', "is that of 'other'"),
    ],
)
def test_what_is_odd_and_loads_is_worth_a_note(
    repo: Path, file: str, old: str, new: str, note: str
) -> None:
    replace_text(repo / "demo" / file, old, new)
    (problem,) = check_repository(repo)
    assert not problem.fatal
    assert note in problem.what


ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "text_input" data_type: TYPE_STRING dims: 1 } %s
output { name: "answer" data_type: TYPE_STRING dims: 1 } %s
ensemble_scheduling {
  step {
    model_name: "demo" model_version: -1
    input_map { key: "text_input" value: "text_input" }
    output_map { key: "text_output" value: "answer" } %s
  } %s
}
"""
ODD = (
    'input { name: "extra" data_type: TYPE_STRING dims: 1 }',
    'output { name: "lost" data_type: TYPE_STRING dims: 1 }',
    'input_map { key: "no_such_input" value: "nowhere" }',
    'step { model_name: "absent" model_version: -1 }',
)


def test_an_ensemble_is_followed_tensor_by_tensor(repo: Path) -> None:
    folder = repo / "whole"
    (folder / "1").mkdir(parents=True)
    (folder / modelconfig.FILE).write_text(ENSEMBLE % ("", "", "", ""))
    assert check_repository(repo) == []
    text = (ENSEMBLE % ODD).replace("_STRING", "_INT32").replace("max_batch_size: 8", SIZE_9)
    (folder / modelconfig.FILE).write_text(text)
    told = "\n".join(str(problem) for problem in check_repository(repo))
    for part in (
        "step absent is no model", "demo has no input no_such_input",
        "nothing makes the tensor nowhere", "input extra goes nowhere",
        "output lost comes from nowhere", "output answer has another data_type",
        "its text_input is INT32 and demo's text_input STRING",
        "its max_batch_size is 9 and demo's 8",
    ):  # fmt: skip
        assert part in told


def test_nothing_is_no_repository(tmp_path: Path) -> None:
    assert check_repository(tmp_path)[0].fatal
    assert check_repository(tmp_path / "gone")[0].fatal
