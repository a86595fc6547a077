"""Which plugins are let in: by the API that they are made for, and by the environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmserve.api import API
from llmserve.registry import Plugin, Registry, find_plugins
from llmserve.roles import Tokenizer
from llmserve_cli.plugins import unmatched_names

ROOT = Path(__file__).parents[2]
TOKENIZERS = """
from llmserve import hookimpl
from llmserve.roles import Tokenizer
from llmserve_cli.plugins import unmatched_names

@hookimpl
def llmserve_register_tokenizers():
    return [Tokenizer(name="words", summary="", runtime="json:loads")]
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, and nothing else that announces plugins."""
    monkeypatch.setattr(
        sys, "path", [str(tmp_path), *(p for p in sys.path if "-packages" not in p)]
    )
    monkeypatch.delenv("LLMSERVE_PLUGINS", raising=False)
    monkeypatch.delenv("LLMSERVE_BLOCK_PLUGINS", raising=False)
    return tmp_path


def install(site: Path, distribution: str, entries: str) -> None:
    home = site / f"{distribution.replace('-', '_')}-1.2.dist-info"
    home.mkdir()
    (home / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.2\n")
    (home / "entry_points.txt").write_text(entries)


def found(**environment: str) -> dict[str, Plugin]:
    return {plugin.selector: plugin for plugin in find_plugins(environment)}


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (API + 1, f"upgrade llmserve, or install an acme for API {API}"),
        (API - 1, f"install an acme for API {API}"),
    ],
)
def test_a_plugin_for_another_api_is_refused_in_one_line_and_never_imported(
    site: Path, number: int, mend: str
) -> None:
    (site / "acme_module.py").write_text("raise SystemExit('it was imported')")
    install(site, "acme", f"[llmserve.api{number}]\nwords = acme_module\n")
    problem = found()["acme:words"].problem or ""
    assert problem.startswith(f"it is made for API {number} of llmserve, and llmserve ")
    assert problem.endswith(f" has {API}: {mend}")
    assert "acme_module" not in sys.modules
    told = Registry.load().problems()
    assert told == [f"plugin 'words' (acme 1.2) cannot be used: {problem}"]


def test_a_plugin_for_this_api_or_for_none_is_let_in(site: Path) -> None:
    install(site, "acme", f"[llmserve.api{API}]\na = json\n[llmserve]\nb = ast\n")
    assert [(p.name, p.api, p.problem) for p in found().values()] == [
        ("core", API, None),
        ("a", API, None),
        ("b", None, None),
    ]


PACKAGES = [
    path
    for pattern in ("plugins/*/pyproject.toml", "plugins/examples/*/pyproject.toml")
    for path in sorted(ROOT.glob(pattern))
]


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.name)
def test_what_we_tell_others_to_say_our_own_packages_say_too(path: Path) -> None:
    groups = re.findall(r"(?m)^\[project\.entry-points\.(.+)\]$", path.read_text(encoding="utf-8"))
    assert groups == [f'"llmserve.api{API}"']


def test_of_several_that_one_package_offers_the_one_that_fits_is_taken(site: Path) -> None:
    entries = f"[llmserve.api{API + 1}]\na = nowhere\n[llmserve]\na = ast\n"
    install(site, "acme", f"{entries}[llmserve.api{API}]\na = json\n")
    install(site, "bolt", entries)
    assert found()["acme:a"].entry_point == "json"
    assert found()["bolt:a"].entry_point == "ast"


def test_a_group_that_is_no_number_is_told(site: Path) -> None:
    install(site, "acme", "[llmserve.apione]\na = json\n[llmserve.other]\nb = json\n")
    for name in "ab":
        assert f"name it llmserve.api{API} or llmserve" in (found()[f"acme:{name}"].problem or "")


def test_an_entry_point_that_names_an_attribute_is_told(site: Path) -> None:
    install(site, "acme", "[llmserve]\na = json:dumps\n")
    assert found()["acme:a"].problem == (
        "its entry point names an attribute (json:dumps): name the module, json"
    )


def test_one_of_two_plugins_of_the_same_name_is_blocked(site: Path) -> None:
    install(site, "acme", "[llmserve]\nhf = json\n")
    install(site, "Bad_Acme", "[llmserve]\nhf = no_such_module\n")
    one = found(LLMSERVE_BLOCK_PLUGINS="bad-acme:hf")
    assert one["acme:hf"].problem is None
    assert one["Bad_Acme:hf"].problem == "LLMSERVE_BLOCK_PLUGINS names it"
    both = found(LLMSERVE_BLOCK_PLUGINS="hf")
    assert both["acme:hf"].problem == both["Bad_Acme:hf"].problem
    assert both["acme:hf"].problem


def test_one_of_two_plugins_of_the_same_name_is_let_in(site: Path) -> None:
    install(site, "acme", "[llmserve]\nhf = json\n")
    install(site, "bad-acme", "[llmserve]\nhf = no_such_module\n")
    only = found(LLMSERVE_PLUGINS=" Acme:hf ,")
    assert only["acme:hf"].problem is None
    assert only["bad-acme:hf"].problem == "it is not in LLMSERVE_PLUGINS"


def test_a_collision_is_told_with_what_blocks_one_of_them(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("acme", "bolt"):
        (site / f"{name}_module.py").write_text(TOKENIZERS)
        install(site, name, f"[llmserve]\nit = {name}_module\n")
    with pytest.raises(Exception, match=r"or set LLMSERVE_BLOCK_PLUGINS=bolt:it$"):
        Registry.load().get(Tokenizer, "words")
    monkeypatch.setenv("LLMSERVE_BLOCK_PLUGINS", "bolt:it")
    assert Registry.load().get(Tokenizer, "words").name == "words"


def test_a_name_in_the_environment_that_nobody_has_is_told(site: Path) -> None:
    install(site, "acme", "[llmserve]\nhf = json\n")
    environment = {"LLMSERVE_BLOCK_PLUGINS": "acme:hff", "LLMSERVE_PLUGINS": "acme:hf, hg"}
    assert unmatched_names(Registry(find_plugins({})), environment) == [
        "LLMSERVE_PLUGINS names 'hg', and no installed plugin is called that",
        "LLMSERVE_BLOCK_PLUGINS names 'acme:hff', and no installed plugin is called that",
    ]


def test_the_list_says_where_each_plugin_comes_from(tmp_path: Path) -> None:
    install(tmp_path, "acme", "[llmserve]\nwords = acme_module\n[llmserve.api99]\nnew = x\n")
    (tmp_path / "acme_module.py").write_text(TOKENIZERS)
    command = [sys.executable, "-m", "llmserve_cli", "plugins"]
    env = {"PYTHONPATH": str(tmp_path), "LLMSERVE_BLOCK_PLUGINS": "wrods", "PATH": ""}
    done = subprocess.run([*command, "--json"], env=env, capture_output=True, check=True)
    listed = json.loads(done.stdout)
    plugins = {plugin.pop("name"): plugin for plugin in listed["plugins"]}
    assert plugins["words"] == {
        "distribution": "acme",
        "version": "1.2",
        "api": None,
        "entry_point": "acme_module",
        "path": str(tmp_path / "acme_module.py"),
        "problem": None,
    }
    assert plugins["new"]["api"] == 99
    assert plugins["new"]["path"] == str(tmp_path)
    assert any("'wrods'" in problem for problem in listed["problems"])
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in shown.splitlines()]
    path = str(tmp_path / "acme_module.py")
    assert ["words", "acme", "1.2", "-", "acme_module", path] in rows


def test_damaged_metadata_hides_nobody_else(site: Path) -> None:
    install(site, "a", "[llmserve]\na = json\n")
    install(site, "b", "")
    (site / "b-1.2.dist-info" / "entry_points.txt").write_bytes(b"[other]\n\xff = x\n")
    install(site, "c", "[llmserve]\nc = ast\n")
    (site / "d-1.2.dist-info").mkdir()
    (site / "d-1.2.dist-info" / "entry_points.txt").write_text("[llmserve]\nd = json\n")
    assert {"a:a", "c:c"} <= found().keys()


def test_the_first_distribution_of_a_name_counts(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "later").mkdir()
    install(site, "acme-llmserve", "[llmserve]\nacme = json\n")
    install(site / "later", "Acme.LLMserve", "[llmserve]\nshadowed = ast\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site / "later")])
    assert list(found()) == ["llmserve:core", "acme-llmserve:acme"]
