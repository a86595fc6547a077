"""Plugins: collisions, misspelt hooks, wrong returns and blocked ones, each told and contained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmserve import hookimpl
from llmserve import registry as plugins
from llmserve.builder.plan import BuildSpec, make_plan
from llmserve.errors import PluginError
from llmserve.registry import Plugin, Registry, find_plugins
from llmserve.repository.check import ask_plugins
from llmserve.repository.problems import CheckedModel, Problem
from llmserve.roles import Backend, Formatter, Recipe, Tokenizer
from llmserve.runtime.contract import Tensor


def tokenizer(name: str) -> Tokenizer:
    return Tokenizer(name=name, summary="", runtime="acme:Tokenizer")


def module(**hooks: Callable[..., Any]) -> ModuleType:
    made = ModuleType("acme_plugin")
    for name, hook in hooks.items():
        hook.__name__ = name
        setattr(made, name, hookimpl(hook))
    return made


def registry(**modules: ModuleType) -> Registry:
    return Registry(
        Plugin(name, f"{name}-dist", "1.0", module=made) for name, made in modules.items()
    )


def problem_of(found: Registry, name: str) -> str:
    plugin = next(plugin for plugin in found.plugins if plugin.name == name)
    assert plugin.problem is not None
    return plugin.problem


def test_components_are_found_by_role_and_name() -> None:
    found = registry(acme=module(llmserve_register_tokenizers=lambda: [tokenizer("words")]))
    assert found.get(Tokenizer, "words").runtime == "acme:Tokenizer"
    assert found.plugin_of(found.get(Tokenizer, "words")).origin == "acme-dist"


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", "hare"), ("cuda", "mole"), ("cuda:1", "mole"), ("balanced", "mole")],
)
def test_who_names_no_recipe_gets_the_one_that_suits_the_device(device: str, expected: str) -> None:
    ranks: dict[str, dict[str, int]] = {"tortoise": {"cpu": 1}, "hare": {"cpu": 2}, "none": {}}
    ranks["mole"] = {"cpu": 1, "cuda": 1}
    recipes = [Recipe(name=n, summary="", generator="", suits=suits) for n, suits in ranks.items()]
    found = registry(acme=module(llmserve_register_recipes=lambda: recipes))
    recipe, why = found.suited(device)
    assert recipe.name == expected
    if device == "cpu":
        assert why == "first of what is installed for cpu, before mole, before tortoise"


def test_where_nothing_suits_a_plugin_has_to_be_named() -> None:
    with pytest.raises(PluginError, match="suits cpu: name one with --plugin"):
        registry().suited("cpu")


def test_an_unknown_name_gets_near_ones() -> None:
    found = registry(acme=module(llmserve_register_tokenizers=lambda: [tokenizer("words")]))
    with pytest.raises(PluginError, match="did you mean 'words'"):
        found.get(Tokenizer, "word")


def test_a_part_that_is_gone_is_told_with_its_recipe_and_not_as_a_slip_of_the_pen() -> None:
    recipe = Recipe(name="mixed", summary="", generator="", tokenizer="gone")
    found = registry(acme=module(llmserve_register_recipes=lambda: [recipe]))
    with pytest.raises(PluginError, match=r"recipe 'mixed' .* 'gone'.*: install") as caught:
        make_plan(BuildSpec("mixed", "demo"), found)
    assert "did you mean" not in str(caught.value)


def test_a_collision_names_both_and_stops_only_who_selects_it() -> None:
    found = registry(
        one=module(llmserve_register_tokenizers=lambda: [tokenizer("words"), tokenizer("a")]),
        two=module(llmserve_register_tokenizers=lambda: [tokenizer("words")]),
    )
    with pytest.raises(PluginError, match=r"one-dist.*two-dist"):
        found.get(Tokenizer, "words")
    assert found.get(Tokenizer, "a").name == "a"
    assert any("'words' is registered by" in problem for problem in found.problems())


def test_the_same_name_in_another_role_is_no_collision() -> None:
    formatter = Formatter(name="words", summary="", runtime="acme:F", outputs=())
    found = registry(
        acme=module(
            llmserve_register_tokenizers=lambda: [tokenizer("words")],
            llmserve_register_formatters=lambda: [formatter],
        )
    )
    assert found.get(Formatter, "words") is formatter
    assert not found.problems()


def test_a_misspelt_hook_is_told_with_the_right_one() -> None:
    found = registry(acme=module(llmserve_register_tokeniser=lambda: []))
    assert "llmserve_register_tokenizers" in problem_of(found, "acme")


def test_a_hook_without_its_mark_is_told() -> None:
    made = ModuleType("acme_plugin")
    made.llmserve_register_tokenizers = lambda: []  # type: ignore[attr-defined]
    assert "hookimpl" in problem_of(registry(acme=made), "acme")


def test_a_hook_with_arguments_that_it_does_not_get_is_told() -> None:
    found = registry(acme=module(llmserve_register_tokenizers=lambda wanted: []))
    assert "wanted" in problem_of(found, "acme")


def test_a_hook_that_raises_or_returns_something_else_breaks_its_plugin_alone() -> None:
    def fails() -> list[Tokenizer]:
        raise RuntimeError("no licence")

    recipe = Recipe(name="r", summary="", tokenizer="", generator="", batching="", formatter="")
    found = registry(
        bad=module(llmserve_register_tokenizers=fails),
        odd=module(llmserve_register_tokenizers=lambda: [recipe]),
        good=module(llmserve_register_tokenizers=lambda: [tokenizer("words")]),
    )
    assert problem_of(found, "bad") == "RuntimeError: no licence"
    assert "Recipe" in problem_of(found, "odd")
    assert found.get(Tokenizer, "words")


def test_a_hook_that_ends_the_process_breaks_its_plugin_alone() -> None:
    def leaves() -> list[Tokenizer]:
        raise SystemExit(3)

    found = registry(
        bad=module(llmserve_register_tokenizers=leaves),
        good=module(llmserve_register_tokenizers=lambda: [tokenizer("words")]),
    )
    assert problem_of(found, "bad") == "SystemExit: 3"
    assert found.get(Tokenizer, "words")


@pytest.mark.parametrize("broken", [False, True])
def test_a_plugin_cannot_switch_off_another_by_taking_its_name(broken: bool) -> None:
    def fails() -> list[Tokenizer]:
        raise RuntimeError("no licence")

    theirs = module(llmserve_register_tokenizers=fails if broken else lambda: [tokenizer("a")])
    ours = module(llmserve_register_tokenizers=lambda: [tokenizer("words")])
    found = Registry(
        [Plugin("hf", "ours", "1", module=ours), Plugin("hf", "theirs", "2", module=theirs)]
    )
    assert found.plugin_of(found.get(Tokenizer, "words")).origin == "ours"
    assert [bool(plugin.problem) for plugin in found.plugins] == [False, broken]
    origins = {p.origin for p, _ in found.implementations("llmserve_register_tokenizers")}
    assert origins == ({"ours"} if broken else {"ours", "theirs"})


def test_a_module_that_two_plugins_announce_counts_once() -> None:
    made = module(llmserve_register_tokenizers=lambda: [tokenizer("words")])
    found = registry(one=made, two=made)
    assert found.plugin_of(found.get(Tokenizer, "words")).name == "one"
    assert "one-dist" in problem_of(found, "two")


def test_selecting_a_broken_plugin_says_why() -> None:
    found = registry(acme=module(llmserve_register_recipe=lambda: []))
    with pytest.raises(PluginError, match=r"acme-dist 1\.0.*no hook"):
        found.recipe("acme")


def points(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    found = [
        Plugin(name, f"{name}-dist", "1.0", entry_point=value) for name, value in values.items()
    ]
    monkeypatch.setattr(plugins, "_installed", lambda: found)


def test_an_import_that_fails_breaks_its_plugin_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    points(monkeypatch, gone="no_such_module_anywhere", fine="json")
    found = {plugin.name: plugin for plugin in Registry(find_plugins({})).plugins}
    assert "no_such_module_anywhere" in (found["gone"].problem or "")
    assert found["fine"].problem is None
    assert found["core"].problem is None


def test_a_blocked_plugin_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    points(monkeypatch, gone="no_such_module_anywhere", json="json")
    found = {p.name: p for p in find_plugins({"LLMSERVE_BLOCK_PLUGINS": "gone, other"})}
    assert found["gone"].problem == "LLMSERVE_BLOCK_PLUGINS names it"
    assert found["json"].problem is None


def test_only_the_named_plugins_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    points(monkeypatch, gone="no_such_module_anywhere", json="json")
    found = {p.name: p for p in find_plugins({"LLMSERVE_PLUGINS": "json"})}
    assert found["gone"].problem == "it is not in LLMSERVE_PLUGINS"
    assert found["json"].problem is None


def test_plugins_are_asked_about_a_model_and_one_that_fails_is_told() -> None:
    def fails(model: CheckedModel) -> list[Problem]:
        raise KeyError(model.name)

    wrong = Problem("demo", "acme.bin is missing", "build it again")
    found = registry(
        acme=module(llmserve_check_model=lambda model: [wrong]),
        bad=module(llmserve_check_model=fails),
    )
    told = list(ask_plugins(found, CheckedModel(Path("demo"), None, {})))
    assert told[0] == wrong
    assert "plugin 'bad' (bad-dist 1.0) failed: KeyError: 'demo'" in told[1].what
    assert not told[1].fatal


def test_a_backend_is_found_by_its_name() -> None:
    backend = Backend(name="acme", summary="", folder=Path("acme"), stand_in_for="onnxruntime")
    found = registry(acme=module(llmserve_register_backends=lambda: [backend]))
    assert found.all(Backend) == [backend]


def test_a_type_that_triton_does_not_have_is_told_with_those_it_has() -> None:
    def register() -> list[Tokenizer]:
        return [replace(tokenizer("words"), inputs=(Tensor("pace", "INT32"),))]

    problem = problem_of(registry(acme=module(llmserve_register_tokenizers=register)), "acme")
    assert "tensor pace cannot be INT32: choose one of TYPE_BOOL" in problem
    assert "TYPE_INT32" in problem


def test_where_a_plugin_fails_is_shown_to_who_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> list[Tokenizer]:
        raise RuntimeError("no licence")

    made = module(llmserve_register_tokenizers=fails)
    assert problem_of(registry(acme=made), "acme") == "RuntimeError: no licence"
    assert not capsys.readouterr().err
    monkeypatch.setenv("LLMSERVE_TRACEBACK", "1")
    registry(acme=made)
    assert "in fails" in capsys.readouterr().err


def test_what_recipes_and_formatters_do_not_say_is_what_most_have() -> None:
    recipe = Recipe(name="r", summary="", generator="g")
    assert (recipe.tokenizer, recipe.batching, recipe.formatter) == (
        "transformers",
        "dynamic",
        "text",
    )
    count = Tensor("count", "TYPE_INT32", optional=False)
    plain = Formatter(name="f", summary="", runtime="acme:F")
    counting = replace(plain, extra_outputs=(count,))
    assert counting.outputs == (*plain.outputs, count)
    assert replace(counting, name="g").outputs == counting.outputs
