"""`llmserve check` finds what would not load and describes it in plain words."""

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
from llmserve.plugins.registry import Plugin, Registry, find_plugins
from llmserve.repository import config as modelconfig
from llmserve.repository.check import check_repository
from llmserve.testing.command import run
from tests.support import describe, replace_text, with_path


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    llmserve.build("hf", "demo", output=tmp_path / "repo")
    return tmp_path / "repo"


CONFIG, MANIFEST = "config.pbtxt", "llmserve.json"
SIZE, SIZE_9 = "max_batch_size: 8", "max_batch_size: 9"
INSTALLED = "where the packages are installed"
FULL = "in a full check"


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
        ("1/model.py", "", "def (", "is not valid Python", ()),
        ("1/model/model.safetensors", "", None, r"model\.safetensors is missing", ()),
        ("1", "", "one", "no version folder", ()),
        ("../notes/x", "", "", "notes: it is not a model", (FULL,)),
        (MANIFEST, "", None, r"llmserve\.json is missing", ()),
        (MANIFEST, "", "{}", "is damaged", ()),
        (MANIFEST, '"settings": {}', '"setting": {}', "is damaged", ()),
        (MANIFEST, '"formatter": {', '"farmatter": {', "names no formatter", ()),
        (MANIFEST, '"torch": ', '"no-such-package": ', "no-such-package", (INSTALLED,)),
        (MANIFEST, "llmserve_hf.generator:", "llmserve_hf.gone:", "no module", (INSTALLED,)),
        (MANIFEST, "generator:TransformersGenerator", "generator", "of the form", (INSTALLED,)),
        (MANIFEST, "llmserve.runtime:TransformersTokenizer", "llmserve.runtime:BatchDriver",
         "BatchDriver has no method encode or encode_chat or decode", (INSTALLED, FULL)),
    ],
)  # fmt: skip
def test_what_would_not_load_is_found(
    repo: Path, file: str, old: str, new: str | None, message: str, only: tuple[str, ...]
) -> None:
    def is_found(**options: Any) -> bool:
        fatal = [problem for problem in check_repository(repo, **options) if problem.fatal]
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
    assert is_found()
    assert is_found(quick=True, models=["demo"]) == (FULL not in only)
    assert is_found(served_here=False) == (INSTALLED not in only)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.pbtxt", "config.pbtxt is missing"),
        ("1/model.py", "1/model.py is missing"),
        ("1/model/model.safetensors", "1/model/model.safetensors is missing"),
        ("1/model", "1/model/config.json and 2 more are missing"),
    ],
)
def test_what_is_missing_is_reported_once(repo: Path, file: str, message: str) -> None:
    (repo / "demo" / file).rename(repo.parent / "moved")
    assert [problem.message for problem in check_repository(repo)] == [message]


QUICK = """
import sys, time
from pathlib import Path
started = time.process_time()
from llmserve.repository.check import check_repository
assert check_repository(Path(sys.argv[1]), quick=True) == []
assert time.process_time() - started < 1, time.process_time() - started
assert not {"torch", "transformers"} & sys.modules.keys()
"""


def test_a_quick_check_takes_less_than_a_second_and_loads_nothing_heavy(repo: Path) -> None:
    subprocess.run([sys.executable, "-c", QUICK, str(repo)], check=True)


@pytest.mark.long
def test_a_package_for_numpy_2_beside_numpy_1_is_found_with_what_mends_it(
    repo: Path, tmp_path: Path
) -> None:
    """As `pip install nncf` and then `pip install 'numpy<2'` left it: only a model's own module
    of transformers imports scipy, so everything else seems to work."""
    site = tmp_path / "site"
    for name in ("scipy", "sklearn"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("raise ImportError('made for numpy 2')")
    describe(site, "scipy", "1.18.1", requires=["numpy>=2.0.0"])
    describe(site, "scikit-learn", "1.8.0", requires=["scipy>=1.10"])
    checked = run("check", str(repo), env=with_path(site))
    assert checked.returncode == 3, checked
    assert "the packages installed here cannot load the model" in checked.stdout + checked.stderr
    needs = "scipy 1.18.1 needs numpy>=2.0.0, and numpy 1."
    for done in (
        checked,
        run("build", "--plugin", "hf", "--model", "demo", env=with_path(site), cwd=tmp_path),
    ):
        assert done.returncode == 3, done
        (line,) = [line for line in (done.stdout + done.stderr).splitlines() if needs in line]
        assert "made for numpy 2" in line
        command = line.rpartition(" install ")[2]
        assert command.startswith("'numpy<2' ")
        assert {"scipy", "scikit-learn"} <= set(command.split())
    assert not (tmp_path / "model_repository").exists()


@pytest.mark.parametrize("raises", [True, False])
def test_a_plugins_check_that_fails_does_not_hide_other_problems(repo: Path, raises: bool) -> None:
    module = ModuleType("acme")

    @hookimpl
    def llmserve_check_model(model: CheckedModel) -> list[Any]:
        if raises:
            raise ZeroDivisionError(model.name)
        return ["not a problem"]

    module.llmserve_check_model = llmserve_check_model  # type: ignore[attr-defined]
    registry = Registry([*find_plugins(), Plugin("acme", "llmserve-acme", "1.0", module=module)])
    (repo / "demo" / "1" / "model.py").unlink()
    report = "\n".join(str(problem) for problem in check_repository(repo, registry))
    why = "ZeroDivisionError" if raises else "TypeError: it returned 'not a problem'"
    assert f"check of plugin 'acme' (llmserve-acme 1.0) failed: {why}" in report
    assert "1/model.py is missing" in report


@pytest.mark.parametrize(
    ("file", "old", "new", "note"),
    [
        ("client.py", "import ", "import  ", "client.py was changed"),
        (MANIFEST, '"name": "demo"', '"name": "other"', "is that of 'other'"),
    ],
)
def test_what_is_suspicious_but_loads_gets_a_note(
    repo: Path, file: str, old: str, new: str, note: str
) -> None:
    replace_text(repo / "demo" / file, old, new)
    (problem,) = check_repository(repo)
    assert not problem.fatal
    assert note in problem.message


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


def test_an_ensemble_is_checked_tensor_by_tensor(repo: Path) -> None:
    folder = repo / "whole"
    (folder / "1").mkdir(parents=True)
    (folder / modelconfig.FILE).write_text(ENSEMBLE % ("", "", "", ""))
    assert check_repository(repo) == []
    text = (ENSEMBLE % ODD).replace("_STRING", "_INT32").replace("max_batch_size: 8", SIZE_9)
    (folder / modelconfig.FILE).write_text(text)
    report = "\n".join(str(problem) for problem in check_repository(repo))
    for message in (
        "step absent is not a model", "demo has no input no_such_input",
        "nothing produces the tensor nowhere", "no step uses its input extra",
        "nothing produces its output lost", "output answer has another data_type",
        "its text_input is INT32 and demo's text_input STRING",
        "its max_batch_size is 9 and demo's 8",
    ):  # fmt: skip
        assert message in report


def test_an_empty_or_missing_folder_is_not_a_repository(tmp_path: Path) -> None:
    assert check_repository(tmp_path)[0].fatal
    assert check_repository(tmp_path / "gone")[0].fatal
