"""Plugin packages, installed unchanged and run with a real Triton.

They are what `llmserve plugin new` writes for each role, the examples of the guide for authors, and
a plugin that breaks its promises.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llmserve.plugins import hookspecs
from llmserve.plugins.api import API
from llmserve.scaffold import ROLES, new_package
from tests.authoring import PAGE, blocks, install_examples
from tests.support import install, with_path

pytestmark = pytest.mark.long

PART = re.compile(r"^### (llmserve_\w+)\n(.*?)(?=^##)", re.MULTILINE | re.DOTALL)
SECTIONS = dict(PART.findall(PAGE.read_text(encoding="utf-8")))
HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("llmserve_"))
BROKEN = """
from llmserve import hookimpl
from llmserve.plugins.roles import Batching, Generator, Recipe
from llmserve.runtime.drivers.batch import BatchDriver
from llmserve.runtime.contract import SAMPLING

class Crowd:
    context_length = 100
    eos_ids = frozenset()

    def __init__(self, settings, folder):
        pass

    def generate(self, generations, tokenizer):
        for generation in generations:
            while not generation.done:
                generation.push(ord("a") + len(generations))

class Unloadable(Crowd):
    def __init__(self, settings, folder):
        raise ValueError("the weights are cut short")

class Suspicious(BatchDriver):
    "Compares the test kit's fakes with Triton's own objects."

    def start(self, parts):
        from llmserve.testing import FakeBackendUtils

        super().start(parts)
        self.differences = []
        for name, value in vars(FakeBackendUtils).items():
            if not name.startswith("_"):
                real = getattr(parts.pb_utils, name, "missing")
                if real == "missing" or (type(value) is int and int(real) != value):
                    self.differences.append(f"pb_utils.{name}: {real}")
        self._compare(parts.pb_utils.Logger, vars(FakeBackendUtils().Logger.__class__))

    def execute(self, requests):
        from llmserve.testing import FakeRequest
        from llmserve.testing import FakeTensor

        fake_only = ("replace_input", "text", "error", "failure", "send")
        names = [name for name in vars(FakeRequest) if name not in fake_only]
        self._compare(requests[0], names)
        self._compare(requests[0].inputs()[0], vars(FakeTensor))
        self._compare(requests[0].get_response_sender(), ["send", "is_cancelled"])
        if self.differences:
            raise RuntimeError("; ".join(self.differences))
        super().execute(requests)

    def _compare(self, real, names):
        for name in names:
            if not name.startswith("_") and not hasattr(real, name):
                self.differences.append(f"{type(real).__name__}.{name}: missing")

@hookimpl
def llmserve_register_batchings():
    return [Batching(name="suspicious", summary="", runtime="llmserve_broken:Suspicious")]

@hookimpl
def llmserve_register_generators():
    names = {"crowd": "Crowd", "unloadable": "Unloadable"}
    return [
        Generator(name=name, summary="", runtime=f"llmserve_broken:{runtime}", inputs=SAMPLING)
        for name, runtime in names.items()
    ]

@hookimpl
def llmserve_register_recipes():
    return [
        Recipe(name=name, summary="", tokenizer="acme-bytes", generator=name,
               batching="acme-patient", formatter="text")
        for name in ("crowd", "unloadable")
    ] + [
        Recipe(name="suspicious", summary="", tokenizer="acme-bytes", generator="crowd",
               batching="suspicious", formatter="text")
    ]
"""
FULL_SUITE = {"generator", "batching"}
"""Roles whose components run a model; the full conformance suite is run for them."""
TOGETHER = '    options = {"tokenizer": "new-tokenizer", "formatter": "new-formatter"}\n'
"""For the suite of the batching, so that one model runs three components. They have one suite."""
BROKEN_TESTS = """
from llmserve.testing import RecipeConformance

class TestCrowd(RecipeConformance):
    recipe = "crowd"
    options = {"patience_ms": 50.0}

class TestUnloadable(RecipeConformance):
    recipe = "unloadable"

def test_the_fakes_have_nothing_that_triton_lacks(triton):
    name = triton.build("suspicious")
    assert triton.client.generate(name, "Hello").text
"""


@dataclass(frozen=True)
class Installed:
    """A folder with all packages, and an environment in which Python finds them."""

    folder: Path
    env: Mapping[str, str]

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *args],
            cwd=self.folder, env=self.env, capture_output=True, text=True, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("scaffold")
    site = folder / "site"
    # Packages from before the API had a number use this group, and still run.
    install(site, "llmserve-broken", "[llmserve]\nbroken = llmserve_broken\n", "0.1.0")
    (site / "llmserve_broken.py").write_text(BROKEN)
    (folder / "test_broken.py").write_text(BROKEN_TESTS)
    packages = {role: new_package(f"new-{role}", role, folder) for role in ROLES}
    for mode in ("step", "runner"):
        packages[f"{mode}s"] = new_package(f"new-{mode}s", "generator", folder, mode=mode)
    with next(packages["batching"].glob("tests/*_conformance.py")).open("a") as suite:
        suite.write(TOGETHER)
    path = [site, install_examples(folder / "documented"), *packages.values()]
    result = Installed(folder, with_path(*path))
    # One package is installed as a user would do it; to pip, the others look the same.
    pip = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    done = result.run(*pip, str(site), str(packages.pop(ROLES[0])))
    assert done.returncode == 0, done.stderr
    for role in packages:
        entry = f"[llmserve.api{API}]\nnew-{role} = llmserve_new_{role}\n"
        install(site, f"llmserve-new-{role}", entry, "0.1.0")
    return result


@pytest.fixture(scope="module")
def results(installed: Installed) -> Mapping[str, str]:
    """Run all tests in one process, so that they share a server.

    Returns the failure message of each test, empty if it passed.
    """
    batch_test = "test_answers_in_a_batch_equal_answers_alone"
    tests = []
    for kind in ("Steps", "Runners"):
        own = f"llmserve-new-{kind.lower()}/tests/test_new_{kind.lower()}"
        tests += [f"{own}.py", f"{own}_conformance.py::TestNew{kind}::{batch_test}"]
    for role in ROLES:
        path = f"llmserve-new-{role}/tests/test_new_{role}"
        tests += [f"{path}.py", *([f"{path}_conformance.py"] if role in FULL_SUITE else [])]
    tests += ["documented/tests", "test_broken.py::test_the_fakes_have_nothing_that_triton_lacks"]
    tests += [f"test_broken.py::{suite}::{batch_test}" for suite in ("TestCrowd", "TestUnloadable")]
    options = ["-q", "-p", "llmserve.testing", "-p", "no:cacheprovider", "--rootdir", "."]
    done = installed.run("pytest", *options, "--junitxml", "results.xml", *tests)
    assert done.returncode == 1, done.stdout
    messages = {}
    for case in ElementTree.parse(installed.folder / "results.xml").iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        message = "" if problem is None else str(problem.text)
        messages[f"{case.get('classname')}.{case.get('name')}"] = message
    return messages


def passed(results: Mapping[str, str], part: str) -> list[str]:
    """Return the tests with a part in their name; all of them must have passed."""
    selected = {name: message for name, message in results.items() if part in name}
    assert not {name: message for name, message in selected.items() if message}
    return list(selected)


@pytest.mark.parametrize("role", ROLES)
def test_its_tests_pass_with_a_real_triton(results: Mapping[str, str], role: str) -> None:
    conformance = passed(results, f"test_new_{role}_conformance.TestNew.")
    assert len(conformance) > 15 or role not in FULL_SUITE
    assert len(passed(results, f"test_new_{role}.")) > 1


@pytest.mark.parametrize(("kind", "tests"), [("steps", 3), ("runners", 7)])
def test_a_stepping_generator_serves(results: Mapping[str, str], kind: str, tests: int) -> None:
    assert len(passed(results, f"test_new_{kind}_conformance.")) == 1
    assert len(passed(results, f"test_new_{kind}.")) == tests


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_documented_with_an_example_and_a_test_that_passes(
    hook: str, results: Mapping[str, str]
) -> None:
    assert len(str(getattr(hookspecs, hook).__doc__)) > 30
    examples = blocks(SECTIONS[hook])
    assert f"@hookimpl\ndef {hook}(" in examples["llmserve_acme.py"]
    tests = re.findall(r"^def (test_\w+)", examples["test_acme.py"], re.MULTILINE)
    assert tests
    assert {results[f"documented.tests.test_acme.{name}"] for name in tests} == {""}


def test_the_examples_of_the_guide_for_authors_keep_every_promise(
    results: Mapping[str, str],
) -> None:
    assert len(passed(results, "test_acme.TestAcme.")) > 15
    assert len(passed(results, "documented.tests.")) > 20
    assert len(HOOKS) > 7


def test_the_fakes_have_nothing_that_triton_lacks(results: Mapping[str, str]) -> None:
    assert len(passed(results, "the_fakes_have_nothing")) == 1


def test_a_broken_promise_is_reported_with_its_plugin(results: Mapping[str, str]) -> None:
    (message,) = (text for name, text in results.items() if "TestCrowd" in name)
    lines = message.splitlines()
    assert lines[0].startswith(
        "recipe 'crowd' of plugin 'broken' (llmserve-broken 0.1.0) with patience_ms=50.0 breaks a "
        "promise: an answer is the same alone and beside others (prompt '"
    )
    assert lines[1] == "  expected: ('bbbbbbbbbbbbbbbb', 'length', 16)"
    assert lines[2].startswith("  got:      ('")
    owner = "of plugin 'broken' (llmserve-broken 0.1.0)"
    assert lines[3] == f"  look at:  generator 'crowd', llmserve_broken:Crowd, {owner}"
    assert "batching 'acme-patient', llmserve_acme:Patient" in lines[4]
    assert len(lines) == 5


def test_a_model_that_does_not_load_is_reported_with_the_reason(results: Mapping[str, str]) -> None:
    (message,) = (text for name, text in results.items() if "TestUnloadable" in name)
    first = message.splitlines()[0]
    assert first.startswith("recipe 'unloadable' of plugin 'broken' (llmserve-broken 0.1.0): ")
    assert "the weights are cut short" in first


def test_each_package_is_listed_with_its_components(installed: Installed) -> None:
    done = installed.run("llmserve_cli", "plugins", "--json")
    assert done.returncode == 0, done.stderr
    components = json.loads(done.stdout)["components"]
    own = {(part["role"], part["name"]) for part in components if part["plugin"] == part["name"]}
    for role in ROLES:
        assert {(role, f"new-{role}"), ("recipe", f"new-{role}")} <= own
