"""The guide for plugin authors, and a model of its example whose plugin is missing or changed.

test_scaffold checks that every hook is in the guide, with an example and a test that passes.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

from llmserve import packages
from llmserve.plugins.api import API
from llmserve.repository.check import check_repository
from llmserve.scaffold import ROLES, new_package
from llmserve.testing.command import run
from tests.authoring import PAGE, install_examples
from tests.support import ROOT, files_of, replace_text, with_path

pytestmark = pytest.mark.long

TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("authoring")


@pytest.fixture(scope="module")
def env(folder: Path) -> Mapping[str, str]:
    return with_path(install_examples(folder))


def test_the_examples_pass_the_linter(folder: Path, env: Mapping[str, str]) -> None:
    del env
    rules = ["--isolated", "--select", "E,F,B,UP", "--line-length", "100", "--no-cache"]
    command = [sys.executable, "-m", "ruff", "check", *rules, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_links_names_and_numbers_of_the_guide_are_right() -> None:
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in TEXT.splitlines()
        if line.startswith("#")
    }
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        if target.startswith("#"):
            assert target[1:] in headings, target
        else:
            assert (PAGE.parent / target).exists(), target
    assert f"llmserve.api{API}" in TEXT
    assert f"The number is {API}." in TEXT
    quoted = set(re.findall(r"`(llmserve(?:\.\w+)+)`", TEXT))
    names = {name for name in quoted if not name.endswith((".json", f".api{API}"))}
    assert len(names) > 8
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            import_module(name)
        except ModuleNotFoundError:
            assert hasattr(import_module(module), attribute), name


@pytest.fixture(scope="module")
def repository(folder: Path, env: Mapping[str, str]) -> Path:
    args = ["build", "--plugin", "acme", "--model", "demo", "--output", str(folder / "repo")]
    done = run(*args, env=env)
    assert done.returncode == 0, done.stderr
    return folder / "repo"


def test_the_manifest_and_the_dockerfile_name_the_plugins_package(repository: Path) -> None:
    manifest = json.loads((repository / "demo" / "llmserve.json").read_text())
    assert manifest["packages"]["llmserve-acme"] == "0.1.0"
    assert "numpy" in manifest["packages"]
    assert "llmserve-acme==0.1.0" in (repository / "Dockerfile").read_text()


def test_a_missing_package_is_named_and_nothing_is_started(repository: Path) -> None:
    missing = "demo: it needs llmserve-acme, which is not installed here"
    done = run("serve", str(repository), "--runtime", "embedded", "--http-port", "0")
    assert done.returncode == 3
    hint = f"{packages.install_command('llmserve-acme==0.1.0')}, or serve it from its container"
    assert done.stderr.splitlines()[-1] == f"llmserve: {missing}: {hint}"
    assert "its tokenizer 'acme-bytes' cannot be run" in done.stderr
    # An editable install is not seen by a process that began before it.
    assert "start again a `llmserve serve` that ran before" in done.stderr
    assert "Triton" not in done.stderr
    checked = run("check", str(repository))
    assert (checked.returncode, missing in checked.stdout) == (3, True)
    # Only the models to be loaded count.
    (repository / "other" / "1").mkdir(parents=True)
    (repository / "other" / "1" / "model.py").touch()
    (repository / "other" / "config.pbtxt").write_text('backend: "python"')
    assert not check_repository(repository, models=["other"], quick=True)
    problems = check_repository(repository, models=["demo"], quick=True)
    assert problems == check_repository(repository, quick=True)
    assert len(problems) > 1


def test_a_build_with_a_blocked_plugin_is_refused(tmp_path: Path, env: Mapping[str, str]) -> None:
    args = ["build", "--plugin", "acme", "--model", "demo", "--output", str(tmp_path / "other")]
    done = run(*args, env={**env, "LLMSERVE_BLOCK_PLUGINS": "llmserve-acme:acme"})
    assert done.returncode == 3
    why = "cannot be used: LLMSERVE_BLOCK_PLUGINS names it"
    assert done.stderr == f"llmserve: plugin 'acme' (llmserve-acme 0.1.0) {why}\n"


def test_another_version_of_the_package_is_reported_first(
    repository: Path, folder: Path, env: Mapping[str, str]
) -> None:
    """This must be the last test with this package, because it changes the package's version."""
    metadata = folder / "site" / "llmserve_acme-0.1.0.dist-info" / "METADATA"
    replace_text(metadata, "Version: 0.1.0", "Version: 0.2.0")
    note = (
        "note: demo: it was built with llmserve-acme 0.1.0, and 0.2.0 is installed here: "
        "build it again"
    )
    checked = run("check", str(repository), env=env)
    assert (checked.returncode, checked.stdout) == (0, f"{note}\n")
    # A port in use ends `serve` before it starts a server.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        args = ["serve", str(repository), "--runtime", "embedded", "--http-port", port]
        args += ["--frontend", "none"]
        lines = run(*args, env=env).stderr.splitlines()
    assert lines[0] == f"llmserve: {note}"
    assert port in lines[-1]


WRITE_PACKAGES = """
import sys, llmserve
from pathlib import Path
from llmserve.scaffold import new_package
assert llmserve.__file__.startswith(sys.argv[1])
for role in sys.argv[3:]:
    new_package("acme", role, Path(sys.argv[2], role))
"""


def test_an_installed_llmserve_has_what_plugin_new_copies(tmp_path: Path) -> None:
    site, by_installed, by_checkout = (str(tmp_path / name) for name in ("site", "a", "b"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(ROOT)], check=True)
    command = [sys.executable, "-c", WRITE_PACKAGES, site, by_installed, *ROLES]
    subprocess.run(command, cwd=tmp_path, env=with_path(Path(site)), check=True)
    for role in ROLES:
        new_package("acme", role, Path(by_checkout, role))
    assert files_of(Path(by_installed)) == files_of(Path(by_checkout))
    listed = (Path(site) / "llmserve" / "api.txt").read_text(encoding="utf-8")
    assert listed == (ROOT / "llmserve" / "api.txt").read_text(encoding="utf-8")
