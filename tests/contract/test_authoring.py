"""The page for plugin authors: every hook is on it, with an example and a test that are run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from llmserve import hookspecs
from llmserve.api import API
from tests.authoring import PAGE, blocks, install, run_tests, sections

ROOT = Path(__file__).parents[2]
HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("llmserve_"))
LIVE = "TestAcme or through_triton"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("authoring")


@pytest.fixture(scope="module")
def env(folder: Path) -> Mapping[str, str]:
    return install(folder)


@pytest.fixture(scope="module")
def outcome(folder: Path, env: Mapping[str, str]) -> str:
    done = run_tests(folder, env, "-k", f"not ({LIVE})", "tests")
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_there_are_hooks() -> None:
    assert len(HOOKS) == 8


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_says_what_it_is_for(hook: str) -> None:
    assert len(str(getattr(hookspecs, hook).__doc__)) > 30


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_documented_with_an_example(hook: str) -> None:
    assert hook in sections(), f"plugins/README.md has no section ### {hook}"
    found = blocks(sections()[hook])
    modules = [text for name, text in found.items() if not name.startswith("test_")]
    assert any(f"@hookimpl\ndef {hook}(" in text for text in modules)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_documented_with_a_test_that_passes(hook: str, outcome: str) -> None:
    tests = [name for name in blocks(sections()[hook]) if name.startswith("test_")]
    assert tests, f"plugins/README.md has no test of {hook}"
    for name in tests:
        assert re.search(rf"^PASSED tests/{name}::", outcome, re.MULTILINE), outcome


def test_the_examples_are_listed_as_one_package(env: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "llmserve_cli", "plugins", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    listed = json.loads(done.stdout)
    ours = [(c["role"], c["name"]) for c in listed["components"] if c["origin"] == "llmserve-acme"]
    assert sorted(ours) == [
        ("backend", "acme"),
        ("batching", "acme-patient"),
        ("formatter", "acme-choice"),
        ("formatter", "acme-count"),
        ("generator", "acme-backwards"),
        ("recipe", "acme"),
        ("tokenizer", "acme-bytes"),
    ]
    assert not [problem for problem in listed["problems"] if "acme" in problem]


def test_the_examples_are_in_order_as_linters_see_them(folder: Path, outcome: str) -> None:
    del outcome
    rules = ["--isolated", "--select", "E,F,B,UP", "--line-length", "100", "--no-cache"]
    command = [sys.executable, "-m", "ruff", "check", *rules, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_links_and_numbers_of_the_page_are_right() -> None:
    text = PAGE.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        else:
            assert (PAGE.parent / target).exists(), target
    assert f"llmserve.api{API}" in text
    assert f"The number is {API}." in text


def test_the_names_on_the_page_exist() -> None:
    """Dotted names of llmserve, as they stand between backticks."""
    from importlib import import_module

    text = PAGE.read_text(encoding="utf-8")
    found = set(re.findall(r"`(llmserve(?:\.\w+)+)`", text))
    named = {name for name in found if not name.endswith((".json", f".api{API}"))}
    assert len(named) > 8
    for name in named:
        try:
            import_module(name)
        except ModuleNotFoundError:
            home, _, last = name.rpartition(".")
            assert hasattr(import_module(home), last), name
