"""`llmserve check` finds what would not load, and says it in plain words."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import llmserve
from llmserve.plugin import CheckedModel, Problem, hookimpl
from llmserve.registry import Plugin, Registry, find_plugins
from llmserve.repository import config as modelconfig
from llmserve.repository.check import check_repository


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    llmserve.build("hf", "demo", output=tmp_path / "repo")
    return tmp_path / "repo"


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def spoil_placeholder(model: Path) -> None:
    replace(model / "config.pbtxt", "max_batch_size: 8", "max_batch_size: ${triton_max_batch_size}")


def spoil_syntax(model: Path) -> None:
    replace(model / "config.pbtxt", "max_batch_size: 8", "max_batch_sice: 8")


def spoil_name(model: Path) -> None:
    replace(model / "config.pbtxt", 'name: "demo"', 'name: "other"')


def spoil_batching(model: Path) -> None:
    replace(model / "config.pbtxt", "max_batch_size: 8", "max_batch_size: 0")


def spoil_twice(model: Path) -> None:
    replace(model / "config.pbtxt", 'name: "top_k"', 'name: "top_p"')


def spoil_entry(model: Path) -> None:
    (model / "1" / "model.py").unlink()


def spoil_code(model: Path) -> None:
    (model / "1" / "model.py").write_text("def (")


def spoil_weights(model: Path) -> None:
    (model / "1" / "model" / "model.safetensors").unlink()


def spoil_version(model: Path) -> None:
    (model / "1").rename(model / "one")


def spoil_config(model: Path) -> None:
    (model / "config.pbtxt").unlink()


def spoil_neighbour(model: Path) -> None:
    (model.parent / "notes").mkdir()


def spoil_package(model: Path) -> None:
    replace(model / "llmserve.json", '"torch": ', '"no-such-package": ')


def spoil_manifest(model: Path) -> None:
    (model / "llmserve.json").write_text("{}")


def spoil_settings(model: Path) -> None:
    replace(model / "llmserve.json", '"settings": {}', '"setting": {}')


def spoil_runtime(model: Path) -> None:
    replace(model / "llmserve.json", "llmserve_hf.generator:", "llmserve_hf.no_such_module:")


def spoil_class(model: Path) -> None:
    replace(model / "llmserve.json", "generator:TransformersGenerator", "generator")


def spoil_role(model: Path) -> None:
    replace(model / "llmserve.json", '"formatter": {', '"farmatter": {')


def spoil_method(model: Path) -> None:
    replace(model / "llmserve.json", "hf_tokenizer:TransformersTokenizer", "batch:BatchDriver")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_placeholder, r"\$\{triton_max_batch_size\} in line 2"),
        (spoil_syntax, "max_batch_sice"),
        (spoil_name, "called 'other'"),
        (spoil_batching, "needs a batch dimension"),
        (spoil_twice, "top_p is declared twice"),
        (spoil_entry, r"1/model\.py is missing"),
        (spoil_code, "is no Python"),
        (spoil_weights, r"model\.safetensors is missing"),
        (spoil_version, "no version folder"),
        (spoil_config, r"no config\.pbtxt"),
        (spoil_neighbour, "notes: it is no model"),
        (spoil_package, "no-such-package"),
        (spoil_manifest, "is damaged"),
        (spoil_settings, "is damaged"),
        (spoil_runtime, r"there is no module llmserve_hf\.no_such_module"),
        (spoil_class, "not of the form package.module:Class"),
        (spoil_role, "names no formatter"),
        (spoil_method, "BatchDriver has no method encode or encode_chat or decode"),
    ],
)
def test_what_would_not_load_is_found(
    repo: Path, spoil: Callable[[Path], None], message: str
) -> None:
    def found(**how: Any) -> bool:
        fatal = [problem for problem in check_repository(repo, **how) if problem.fatal]
        return any(re.search(message, str(problem)) for problem in fatal)

    assert check_repository(repo) == []
    spoil(repo / "demo")
    assert found()
    assert found(quick=True, models=["demo"]) == (spoil not in (spoil_method, spoil_neighbour))
    installed = (spoil_package, spoil_runtime, spoil_class, spoil_method)
    assert found(served_here=False) == (spoil not in installed)


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


def test_a_model_that_is_not_there_is_told_with_what_is(repo: Path) -> None:
    (problem,) = check_repository(repo, models=["dmeo"])
    assert str(problem) == f"dmeo: it is not in {repo}: did you mean 'demo'?"


def test_a_check_of_a_plugin_that_fails_hides_no_other(repo: Path) -> None:
    made = ModuleType("acme")

    @hookimpl
    def llmserve_check_model(model: CheckedModel) -> list[Problem]:
        raise ZeroDivisionError(model.name)

    made.llmserve_check_model = llmserve_check_model  # type: ignore[attr-defined]
    registry = Registry([*find_plugins(), Plugin("acme", "llmserve-acme", "1.0", module=made)])
    spoil_entry(repo / "demo")
    told = [str(problem) for problem in check_repository(repo, registry)]
    assert any(
        "check of plugin 'acme' (llmserve-acme 1.0) failed: ZeroDivisionError" in t for t in told
    )
    assert any("1/model.py is missing" in line for line in told)


def test_an_edit_is_worth_a_note(repo: Path) -> None:
    (repo / "demo" / "client.py").write_text("mine")
    (problem,) = check_repository(repo)
    assert not problem.fatal
    assert "client.py was changed" in problem.what


def test_the_papers_of_another_model_are_worth_a_note(repo: Path) -> None:
    replace(repo / "demo" / "llmserve.json", '"name": "demo"', '"name": "other"')
    (problem,) = check_repository(repo)
    assert not problem.fatal
    assert "is that of 'other'" in problem.what


ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "extra" data_type: TYPE_STRING dims: 1 }
output { name: "answer" data_type: TYPE_INT32 dims: 1 }
output { name: "lost" data_type: TYPE_STRING dims: 1 }
ensemble_scheduling {
  step {
    model_name: "demo" model_version: -1
    input_map { key: "text_input" value: "text_input" }
    input_map { key: "no_such_input" value: "nowhere" }
    output_map { key: "text_output" value: "answer" }
  }
  step { model_name: "absent" model_version: -1 }
}
"""


def test_an_ensemble_is_followed_tensor_by_tensor(repo: Path) -> None:
    folder = repo / "whole"
    (folder / "1").mkdir(parents=True)
    (folder / modelconfig.FILE).write_text(ENSEMBLE)
    told = "\n".join(str(problem) for problem in check_repository(repo))
    for part in (
        "step absent is no model", "demo has no input no_such_input",
        "nothing makes the tensor nowhere", "input extra goes nowhere",
        "output lost comes from nowhere", "output answer has another data_type",
    ):  # fmt: skip
        assert part in told


def test_an_ensemble_that_fits_is_left_in_peace(repo: Path) -> None:
    folder = repo / "whole"
    (folder / "1").mkdir(parents=True)
    (folder / modelconfig.FILE).write_text(
        'platform: "ensemble" max_batch_size: 8 '
        'input { name: "text_input" data_type: TYPE_STRING dims: 1 } '
        'output { name: "answer" data_type: TYPE_STRING dims: 1 } '
        'ensemble_scheduling { step { model_name: "demo" model_version: -1 '
        'input_map { key: "text_input" value: "text_input" } '
        'output_map { key: "text_output" value: "answer" } } }'
    )
    assert check_repository(repo) == []


def test_nothing_is_no_repository(tmp_path: Path) -> None:
    assert check_repository(tmp_path)[0].fatal
    assert check_repository(tmp_path / "gone")[0].fatal
