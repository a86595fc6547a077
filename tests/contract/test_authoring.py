"""The page for plugin authors, and what becomes of a model of its example where that plugin is
missing, changed or refused. That every hook is on it, with a test that passes: see test_scaffold.
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

from llmserve.api import API
from llmserve.repository.check import check_repository
from llmserve.scaffold import ROLES, new_package
from tests.authoring import PAGE, install_examples
from tests.support import ROOT, files_of, replace_text, run, with_path

TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("authoring")


@pytest.fixture(scope="module")
def env(folder: Path) -> Mapping[str, str]:
    return with_path(install_examples(folder))


def test_the_examples_are_in_order_as_linters_see_them(
    folder: Path, env: Mapping[str, str]
) -> None:
    del env
    rules = ["--isolated", "--select", "E,F,B,UP", "--line-length", "100", "--no-cache"]
    command = [sys.executable, "-m", "ruff", "check", *rules, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_links_names_and_numbers_of_the_page_are_right() -> None:
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
    found = set(re.findall(r"`(llmserve(?:\.\w+)+)`", TEXT))
    named = {name for name in found if not name.endswith((".json", f".api{API}"))}
    assert len(named) > 8
    for name in named:
        home, _, last = name.rpartition(".")
        try:
            import_module(name)
        except ModuleNotFoundError:
            assert hasattr(import_module(home), last), name


@pytest.fixture(scope="module")
def repository(folder: Path, env: Mapping[str, str]) -> Path:
    words = ["build", "--plugin", "acme", "--model", "demo", "--output", str(folder / "repo")]
    done = run(*words, env=env)
    assert done.returncode == 0, done.stderr
    return folder / "repo"


def test_the_manifest_and_the_dockerfile_name_the_plugins_package(repository: Path) -> None:
    manifest = json.loads((repository / "demo" / "llmserve.json").read_text())
    assert manifest["packages"]["llmserve-acme"] == "0.1.0"
    assert "numpy" in manifest["packages"]
    assert "llmserve-acme==0.1.0" in (repository / "Dockerfile").read_text()


def test_what_is_missing_is_named_and_nothing_is_started(repository: Path) -> None:
    missing = "demo: it needs llmserve-acme, which is not installed here"
    done = run("serve", str(repository), "--runtime", "embedded", "--http-port", "0")
    assert done.returncode == 3
    mend = "pip install llmserve-acme==0.1.0, or serve it from its container"
    assert done.stderr.splitlines()[-1] == f"llmserve: {missing}: {mend}"
    assert "its tokenizer 'acme-bytes' cannot be run" in done.stderr
    assert "Triton" not in done.stderr
    checked = run("check", str(repository))
    assert (checked.returncode, missing in checked.stdout) == (3, True)
    # Only what is to be loaded counts.
    (repository / "other" / "1").mkdir(parents=True)
    (repository / "other" / "1" / "model.py").touch()
    (repository / "other" / "config.pbtxt").write_text('backend: "python"')
    assert not check_repository(repository, models=["other"], quick=True)
    told = check_repository(repository, models=["demo"], quick=True)
    assert told == check_repository(repository, quick=True)
    assert len(told) > 1


def test_a_blocked_plugin_cannot_be_built_with_and_says_so(
    tmp_path: Path, env: Mapping[str, str]
) -> None:
    words = ["build", "--plugin", "acme", "--model", "demo", "--output", str(tmp_path / "other")]
    done = run(*words, env={**env, "LLMSERVE_BLOCK_PLUGINS": "llmserve-acme:acme"})
    assert done.returncode == 3
    why = "cannot be used: LLMSERVE_BLOCK_PLUGINS names it"
    assert done.stderr == f"llmserve: plugin 'acme' (llmserve-acme 0.1.0) {why}\n"


def test_what_is_of_another_version_is_named_before_anything_else(
    repository: Path, folder: Path, env: Mapping[str, str]
) -> None:
    """The last one here: the package is another one after it."""
    metadata = folder / "site" / "llmserve_acme-0.1.0.dist-info" / "METADATA"
    replace_text(metadata, "Version: 0.1.0", "Version: 0.2.0")
    told = (
        "note: demo: it was built with llmserve-acme 0.1.0, and 0.2.0 is installed here: "
        "build it again"
    )
    checked = run("check", str(repository), env=env)
    assert (checked.returncode, checked.stdout) == (0, f"{told}\n")
    # A port that is taken ends it before a server is started.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["serve", str(repository), "--runtime", "embedded", "--http-port", port]
        words += ["--frontend", "none"]
        lines = run(*words, env=env).stderr.splitlines()
    assert lines[0] == f"llmserve: {told}"
    assert port in lines[-1]


INSTALLED = """
import sys, llmserve
from pathlib import Path
from llmserve.scaffold import new_package
assert llmserve.__file__.startswith(sys.argv[1])
for role in sys.argv[3:]:
    new_package("acme", role, Path(sys.argv[2], role))
"""


def test_an_llmserve_from_an_index_has_what_plugin_new_copies(tmp_path: Path) -> None:
    site, written, here = (str(tmp_path / name) for name in ("site", "written", "here"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(ROOT)], check=True)
    command = [sys.executable, "-c", INSTALLED, site, written, *ROLES]
    subprocess.run(command, cwd=tmp_path, env=with_path(Path(site)), check=True)
    for role in ROLES:
        new_package("acme", role, Path(here, role))
    assert files_of(Path(written)) == files_of(Path(here))
    listed = (Path(site) / "llmserve" / "api.txt").read_text(encoding="utf-8")
    assert listed == (ROOT / "llmserve" / "api.txt").read_text(encoding="utf-8")
