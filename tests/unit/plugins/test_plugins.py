"""Plugins: which are loaded, what they register, and that a broken one harms no other."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmserve import hookimpl
from llmserve.builder.plan import BuildSpec, make_plan
from llmserve.contract.tensors import Tensor
from llmserve.errors import PluginError
from llmserve.plugins.api import _CHANGES, API
from llmserve.plugins.options import Option
from llmserve.plugins.registry import Plugin, Registry, find_plugins
from llmserve.plugins.roles import Backend, Formatter, Recipe, Tokenizer
from llmserve.server import ServerSettings
from llmserve.server.checks import find_problems
from llmserve.testing.command import run
from tests.support import ROOT, install

WORDS = Tokenizer(name="words", summary="", runtime="acme:Tokenizer")
TOKENIZERS = """
from llmserve import hookimpl
from llmserve.plugins.roles import Tokenizer

@hookimpl
def llmserve_register_tokenizers():
    return [Tokenizer(name="words", summary="", runtime="json:loads")]
"""


def module(**hooks: Callable[..., Any]) -> ModuleType:
    plugin = ModuleType("acme_plugin")
    for name, hook in hooks.items():
        hook.__name__ = name
        setattr(plugin, name, hookimpl(hook))
    return plugin


def tokenizers(*components: Any) -> ModuleType:
    return module(llmserve_register_tokenizers=lambda: list(components))


def registry_of(**modules: ModuleType) -> Registry:
    return Registry(
        Plugin(name, f"{name}-dist", "1.0", module=plugin) for name, plugin in modules.items()
    )


def test_components_are_found_by_role_and_name() -> None:
    formatter = Formatter(name="words", summary="", runtime="acme:F", outputs=())
    backend = Backend(name="acme", summary="", folder=Path("acme"), stand_in_for="onnxruntime")
    registry = registry_of(
        acme=module(
            llmserve_register_tokenizers=lambda: [WORDS],
            llmserve_register_formatters=lambda: [formatter],
            llmserve_register_backends=lambda: [backend],
        )
    )
    assert registry.get(Tokenizer, "words") is WORDS
    assert registry.plugin_of(WORDS).origin == "acme-dist"
    assert registry.get(Formatter, "words") is formatter, "the same name in another role"
    assert registry.all(Backend) == [backend]
    assert not registry.problems()
    with pytest.raises(PluginError, match="did you mean 'words'"):
        registry.get(Tokenizer, "word")


def test_a_missing_part_is_reported_with_its_recipe_and_not_as_a_typo() -> None:
    recipe = Recipe(name="mixed", summary="", generator="", tokenizer="gone")
    registry = registry_of(acme=module(llmserve_register_recipes=lambda: [recipe]))
    with pytest.raises(PluginError, match=r"recipe 'mixed' .* 'gone'.*: install") as caught:
        make_plan(BuildSpec("mixed", "demo"), registry)
    assert "did you mean" not in str(caught.value)


def test_a_collision_names_both_plugins_and_affects_no_other_component() -> None:
    other = replace(WORDS, name="other")
    registry = registry_of(one=tokenizers(WORDS, other), two=tokenizers(replace(WORDS)))
    with pytest.raises(PluginError, match=r"one-dist.*two-dist"):
        registry.get(Tokenizer, "words")
    assert registry.get(Tokenizer, "other") is other
    assert any("'words' is registered by" in problem.message for problem in registry.problems())


def test_a_backend_that_two_plugins_have_stops_only_the_models_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_backend() -> ModuleType:
        backend = Backend(name="acme", summary="", folder=tmp_path)
        return module(llmserve_register_backends=lambda: [backend])

    registry = registry_of(one=with_backend(), two=with_backend())
    monkeypatch.setattr(Registry, "load", lambda: registry)
    for name, backend in (("needy", "acme"), ("plain", "python")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(f'backend: "{backend}"')
    assert find_problems(ServerSettings(tmp_path, "embedded", models=("plain",))) == []
    (problem,) = find_problems(ServerSettings(tmp_path, "embedded"))
    assert "backend 'acme' is registered by 'one' (one-dist 1.0) and by 'two'" in problem.message
    assert "uninstall one" in str(problem.hint)


def fails() -> list[Tokenizer]:
    raise RuntimeError("no licence")


def exits() -> list[Tokenizer]:
    raise SystemExit(3)


class Panic(BaseException):
    """As a library in Rust raises it."""


def panics() -> list[Tokenizer]:
    raise Panic("no\x1b[31m licence")


def wrong_type() -> list[Tokenizer]:
    return [replace(WORDS, inputs=(Tensor("pace", "INT32"),))]


def with_fields(**fields: Any) -> ModuleType:
    """Return a plugin whose tokenizer has fields of unchecked types."""
    return module(llmserve_register_tokenizers=lambda: [replace(WORDS, **fields)])


def wrong_default() -> list[Tokenizer]:
    wrong: Any = [5]
    return [replace(WORDS, options=(Option("pace", wrong, ""),))]


def reserved() -> list[Backend]:
    return [Backend(name="python", summary="", folder=Path())]


def unmarked() -> ModuleType:
    plugin = ModuleType("acme_plugin")
    plugin.llmserve_register_tokenizers = lambda: []  # type: ignore[attr-defined]
    return plugin


RECIPE = Recipe(name="r", summary="", generator="")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (module(llmserve_register_tokeniser=lambda: []), "llmserve_register_tokenizers"),
        (unmarked(), "hookimpl"),
        (module(llmserve_register_tokenizers=lambda colour: []), "colour"),
        (
            module(llmserve_register_tokenizers=fails),
            "llmserve_register_tokenizers failed: RuntimeError: no licence",
        ),
        (module(llmserve_register_tokenizers=exits), "SystemExit: 3"),
        (module(llmserve_register_tokenizers=panics), r"Panic: no\x1b[31m licence"),
        (tokenizers(RECIPE), "Recipe"),
        (
            module(llmserve_register_tokenizers=lambda: WORDS),
            "llmserve_register_tokenizers failed: TypeError: 'Tokenizer' object is not iterable",
        ),
        (module(llmserve_register_tokenizers=wrong_type), "INT32: choose one of TYPE_BOOL"),
        (module(llmserve_register_tokenizers=wrong_default), "option pace has the default [5]"),
        (with_fields(requires="numpy"), "requires of 'words' is 'numpy': give a tuple of str"),
        (with_fields(inputs=("pace",)), "a tuple of Tensor"),
        (
            module(llmserve_register_backends=reserved),
            "Triton has a backend 'python': give it another name",
        ),
    ],
    ids=[
        "misspelt", "unmarked", "arguments", "raises", "ends the process", "panics", "recipe",
        "no list", "type", "default", "no tuple", "no tensor", "reserved",
    ],
)  # fmt: skip
def test_a_wrong_hook_breaks_its_plugin_alone(broken: ModuleType, message: str) -> None:
    registry = registry_of(bad=broken, good=tokenizers(WORDS))
    bad, good = registry.plugins
    assert message in (bad.problem or "")
    assert good.problem is None
    assert registry.get(Tokenizer, "words") is WORDS
    with pytest.raises(PluginError, match=r"bad-dist 1\.0"):
        registry.recipe("bad")


@pytest.mark.parametrize("broken", [False, True])
def test_a_plugin_cannot_disable_another_by_taking_its_name(broken: bool) -> None:
    hook = fails if broken else lambda: [replace(WORDS, name="a")]
    theirs = module(llmserve_register_tokenizers=hook)
    registry = Registry(
        [
            Plugin("hf", "ours", "1", module=tokenizers(WORDS)),
            Plugin("hf", "theirs", "2", module=theirs),
        ]
    )
    assert registry.plugin_of(registry.get(Tokenizer, "words")).origin == "ours"
    assert [bool(plugin.problem) for plugin in registry.plugins] == [False, broken]
    origins = {p.origin for p, _ in registry.implementations("llmserve_register_tokenizers")}
    assert origins == ({"ours"} if broken else {"ours", "theirs"})


def test_a_module_of_two_plugins_counts_once() -> None:
    plugin = tokenizers(WORDS)
    registry = registry_of(one=plugin, two=plugin)
    assert registry.plugin_of(registry.get(Tokenizer, "words")).name == "one"
    assert "one-dist" in (registry.plugins[1].problem or "")


def test_the_traceback_of_a_plugin_is_printed_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registry_of(acme=module(llmserve_register_tokenizers=fails))
    assert not capsys.readouterr().err
    monkeypatch.setenv("LLMSERVE_TRACEBACK", "1")
    registry_of(acme=module(llmserve_register_tokenizers=fails))
    assert "in fails" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", "hare"), ("cuda", "mole"), ("cuda:1", "mole"), ("balanced", "mole")],
)
def test_the_default_recipe_is_the_one_that_suits_the_device(device: str, expected: str) -> None:
    ranks: dict[str, dict[str, int]] = {"tortoise": {"cpu": 1}, "hare": {"cpu": 2}, "none": {}}
    ranks["mole"] = {"cpu": 1, "cuda": 1}
    recipes = [Recipe(name=n, summary="", generator="", suits=suits) for n, suits in ranks.items()]
    registry = registry_of(acme=module(llmserve_register_recipes=lambda: recipes))
    recipe, why = registry.recipe_for(device)
    assert recipe.name == expected
    if device == "cpu":
        assert why == "first choice for cpu, before mole, before tortoise"


def test_without_a_suitable_recipe_a_plugin_must_be_named() -> None:
    with pytest.raises(PluginError, match="suits cpu: name one with --plugin"):
        registry_of().recipe_for("cpu")


# Installed packages.


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of installed packages, the only one in which plugins are looked up."""
    rest = [path for path in sys.path if "-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *rest])
    monkeypatch.delenv("LLMSERVE_PLUGINS", raising=False)
    monkeypatch.delenv("LLMSERVE_BLOCK_PLUGINS", raising=False)
    return tmp_path


def installed(**environment: str) -> dict[str, Plugin]:
    return {plugin.selector: plugin for plugin in Registry(find_plugins(environment)).plugins}


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (API + 1, f"upgrade llmserve, or install a version of acme for API {API}"),
        (API - 1, f"install a version of acme for API {API}, or change it: {_CHANGES[API - 1]}"),
        (API - 2, f"install a version of acme for API {API}"),
    ],
)
def test_a_plugin_for_another_api_is_refused_in_one_line_and_never_imported(
    site: Path, number: int, hint: str
) -> None:
    source = "raise SystemExit('it was imported')"
    install(site, "acme", f"[llmserve.api{number}]\nwords = acme_module\n", acme_module=source)
    problem = installed()["acme:words"].problem or ""
    assert problem.startswith(f"it is made for API {number} of llmserve, and llmserve ")
    assert problem.endswith(f" has {API}: {hint}")
    assert list(map(str, Registry.load().problems())) == [
        f"plugin 'words' (acme 1.2) cannot be used: {problem}"
    ]


def test_of_several_entry_points_of_a_package_the_matching_one_is_used(site: Path) -> None:
    others = f"[llmserve.api{API + 1}]\na = nowhere\n[llmserve]\na = ast\n"
    install(site, "acme", f"{others}[llmserve.api{API}]\na = json\n")
    install(site, "bolt", others)
    plugins = installed()
    assert (plugins["acme:a"].entry_point, plugins["acme:a"].api) == ("json", API)
    assert (plugins["bolt:a"].entry_point, plugins["bolt:a"].api) == ("ast", None)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[llmserve.apione]\na = json\n", f"name it llmserve.api{API} or llmserve"),
        ("[llmserve.other]\na = json\n", f"name it llmserve.api{API} or llmserve"),
        ("[llmserve]\na = json:dumps\n", "names an attribute (json:dumps): name the module, json"),
        ("[llmserve]\na = no_such_module_anywhere\n", "no_such_module_anywhere"),
    ],
)
def test_a_wrong_entry_point_is_reported(site: Path, entries: str, message: str) -> None:
    install(site, "acme", entries)
    install(site, "bolt", "[llmserve]\nfine = json\n")
    plugins = installed()
    assert message in (plugins["acme:a"].problem or "")
    assert plugins["bolt:fine"].problem is plugins["llmserve:core"].problem is None


PACKAGES = [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("plugins/examples/*/pyproject.toml")]


@pytest.mark.parametrize("path", sorted(PACKAGES), ids=lambda path: path.parent.name)
def test_our_own_packages_declare_the_entry_point_group_that_others_should(path: Path) -> None:
    groups = re.findall(r"(?m)^\[project\.entry-points\.(.+)\]$", path.read_text(encoding="utf-8"))
    assert groups == [f'"llmserve.api{API}"']


@pytest.mark.parametrize(
    ("environment", "problems"),
    [
        ({"LLMSERVE_BLOCK_PLUGINS": "bad-acme:hf, other"}, ("", "LLMSERVE_BLOCK_PLUGINS names")),
        ({"LLMSERVE_BLOCK_PLUGINS": "hf"}, ("LLMSERVE_BLOCK_PLUGINS names",) * 2),
        ({"LLMSERVE_PLUGINS": " Acme:hf ,"}, ("", "it is not in LLMSERVE_PLUGINS")),
    ],
)
def test_the_environment_selects_one_of_two_plugins_of_the_same_name(
    site: Path, environment: dict[str, str], problems: tuple[str, str]
) -> None:
    install(site, "acme", "[llmserve]\nhf = json\n")
    install(site, "Bad_Acme", "[llmserve]\nhf = no_such_module\n")
    plugins = installed(**environment)
    for name, expected in zip(("acme:hf", "Bad_Acme:hf"), problems, strict=True):
        problem = plugins[name].problem or ""
        assert problem.startswith(expected), "a blocked plugin is not imported"
        assert bool(problem) == bool(expected)


def test_the_error_for_a_collision_names_the_setting_that_blocks_one_plugin(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("acme", "bolt"):
        entries = f"[llmserve]\nit = {name}_module\n"
        install(site, name, entries, **{f"{name}_module": TOKENIZERS})
    with pytest.raises(PluginError, match=r"or set LLMSERVE_BLOCK_PLUGINS=bolt:it$"):
        Registry.load().get(Tokenizer, "words")
    monkeypatch.setenv("LLMSERVE_BLOCK_PLUGINS", "bolt:it")
    assert Registry.load().get(Tokenizer, "words").name == "words"


def test_an_unknown_name_in_the_environment_is_reported(site: Path) -> None:
    install(site, "acme", "[llmserve]\nhf = json\n")
    environment = {"LLMSERVE_BLOCK_PLUGINS": "acme:hff", "LLMSERVE_PLUGINS": "acme:hf, hg"}
    assert Registry.unmatched_names(environment) == [
        "LLMSERVE_PLUGINS names 'hg', but no installed plugin has that name",
        "LLMSERVE_BLOCK_PLUGINS names 'acme:hff', but no installed plugin has that name",
    ]


def test_damaged_metadata_hides_no_other_package_and_the_first_of_a_name_counts(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "a", "[llmserve]\na = json\n")
    install(site, "b", "")
    (site / "b-1.2.dist-info" / "entry_points.txt").write_bytes(b"[other]\n\xff = x\n")
    install(site, "c-llmserve", "[llmserve]\nc = ast\n")
    (site / "d-1.2.dist-info").mkdir()
    (site / "d-1.2.dist-info" / "entry_points.txt").write_text("[llmserve]\nd = json\n")
    install(site, "e", "[llmserve]\ne = token\n")
    (site / "e-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: e\n")
    install(site / "later", "C.LLMserve", "[llmserve]\nshadowed = ast\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site / "later")])
    plugins = installed()
    assert {"a:a", "c-llmserve:c"} <= plugins.keys()
    assert "shadowed" not in {plugin.name for plugin in plugins.values()}
    assert plugins["e:e"].problem == "its metadata has no version: install it again"


def test_the_list_shows_where_each_plugin_comes_from(tmp_path: Path) -> None:
    entries = "[llmserve]\nwords = acme_module\n[llmserve.api99]\nnew = x\n"
    install(tmp_path, "acme", entries, acme_module=TOKENIZERS)
    env = {"PYTHONPATH": str(tmp_path), "LLMSERVE_BLOCK_PLUGINS": "wrods", "PATH": ""}
    listed = json.loads(run("plugins", "--json", env=env).stdout)
    plugins = {plugin.pop("name"): plugin for plugin in listed["plugins"]}
    path = str(tmp_path / "acme_module.py")
    assert plugins["words"] == {
        "distribution": "acme", "version": "1.2", "api": None, "entry_point": "acme_module",
        "path": path, "problem": None,
    }  # fmt: skip
    assert (plugins["new"]["api"], plugins["new"]["path"]) == (99, str(tmp_path))
    assert any("'wrods'" in problem for problem in listed["problems"])
    rows = [line.split() for line in run("plugins", env=env).stdout.splitlines()]
    assert ["words", "acme", "1.2", "-", "acme_module", path] in rows
