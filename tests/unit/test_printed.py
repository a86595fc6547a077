"""Commands that pages print are commands that there are, with such options and values."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
from packaging.requirements import InvalidRequirement, Requirement

from llmserve.builder.plan import REQUEST_OPTIONS, SOURCE_OPTIONS
from llmserve.contract.options import OPTIONS
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import MODEL_ROLES, Recipe
from llmserve_cli.group import cli
from tests.site.blocks import RUN_BY, Block, all_blocks, blocks
from tests.site.pages import ROOT

COMMANDS = [(block, line) for block in all_blocks() for line in block.commands()]
CHOSEN = {
    "tokenizer": "tokenizer",
    "generator": "generator",
    "batching": "batching",
    "format": "formatter",
}
TRITONS = {"priority"}
"""Parameters of a request that are not llmserve's."""


def printed(program: str) -> Iterator[tuple[Block, list[str]]]:
    for block, line in COMMANDS:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        if words and Path(words[0]).name == program:
            yield block, words[1:]


def parsed(words: list[str]) -> tuple[click.Context, dict[str, Any], list[str]]:
    """Parse as the command itself does, without looking for the files that are named."""
    command: click.Command = cli
    context = click.Context(cli, info_name="llmserve")
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0]) if words else None
        if found is None:
            raise click.UsageError(f"no command {words[:1]}")
        settings = found.context_settings
        context = click.Context(found, info_name=words[0], parent=context, **settings)
        command, words = found, words[1:]
    values, remaining, _ = command.make_parser(context).parse_args(list(words))
    for parameter in command.params:
        value = values.get(parameter.name or "")
        is_missing = value is None or repr(value).endswith("UNSET")
        if parameter.required and is_missing and not values.get("config"):
            raise click.MissingParameter(ctx=context, param=parameter)
        if not is_missing and not isinstance(parameter.type, click.Path):
            try:
                parameter.type_cast_value(context, value)
            except click.BadParameter as error:
                if "No such file" not in error.message:
                    raise
    return context, values, remaining


def known(recipe: str, registry: Registry, chosen: dict[str, object]) -> set[str]:
    """Return the options of a build: those of all recipes, if none is named."""
    recipes = [r for r in registry.all(Recipe) if not recipe or r.name == recipe]
    if not recipes:
        raise click.UsageError(f"no recipe {recipe}")
    names = {option.name for option in (*SOURCE_OPTIONS, *REQUEST_OPTIONS)}
    for role, kind in MODEL_ROLES.items():
        parts = {getattr(each, role) for each in recipes} | {chosen.get(role)}
        names |= {o.name for part in registry.all(kind) if part.name in parts for o in part.options}
    return names


def check(words: list[str], registry: Registry) -> None:
    context, values, remaining = parsed(words)
    command = context.info_name or ""
    keys = [str(each).partition("=")[0] for each in values.get("assignments") or ()]
    if command in ("query", "chat", "bench"):
        unknown = {*keys} - {*OPTIONS} - TRITONS
    else:
        flags = [word[2:].partition("=")[0] for word in remaining if word.startswith("--")]
        keys += [flag.replace("-", "_") for flag in flags]
        chosen = {role: values.get(flag) or values.get(role) for flag, role in CHOSEN.items()}
        plugin = values.get("plugin")
        named = plugin if isinstance(plugin, str) else ""
        unknown = {*keys} - known(named, registry, chosen) if keys or named else set()
        if remaining and not context.ignore_unknown_options:
            raise click.UsageError(f"too many arguments: {remaining}")
    if unknown:
        raise click.UsageError(f"no option {sorted(unknown)}")
    if command == "compare":
        for recipe, options in re.findall(r"(?:^| )(?:\w+=)?([\w-]+):(\S*)", " ".join(words)):
            check_variant(recipe, options, registry)


def check_variant(recipe: str, options: str, registry: Registry) -> None:
    given = dict(part.split("=", 1) for part in options.split(",") if part)
    chosen: dict[str, object] = {role: given.pop(flag, None) for flag, role in CHOSEN.items()}
    if unknown := {*given} - known(recipe, registry, chosen):
        raise click.UsageError(f"no option {sorted(unknown)} of {recipe}")


def test_each_llmserve_command_is_one_with_such_options() -> None:
    registry, found = Registry.load(), [*printed("llmserve")]
    assert len(found) > 120
    wrong = []
    for block, words in found:
        try:
            check(words, registry)
        except click.UsageError as error:
            wrong.append(f"{block}: llmserve {shlex.join(words)}: {error.message}")
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "serv", "serve --on-demands", "serve --replicas many", "query", "deploy helm --out x",
        "build --plugin hf --model demo --set wait=3", "build --plugin hf --model demo --waits 3",
        "build --plugin hff --model demo", "build --plugin hf", "status surplus",
        "compare a=hf:wait=3 b=hf:", "query demo hello --set temprature=1",
    ],
)  # fmt: skip
def test_one_that_is_none_is_found(line: str) -> None:
    with pytest.raises(click.UsageError):
        check(line.split(), Registry.load())


def test_what_is_installed_is_a_package_of_ours_with_such_an_extra() -> None:
    extras = {}
    for project in [ROOT / "pyproject.toml", *ROOT.glob("plugins/**/pyproject.toml")]:
        text = project.read_text(encoding="utf-8")
        (name,) = re.findall(r'(?m)^name = "(.+)"$', text)
        extras[name] = {*re.findall(r"(?m)^(\w+) = \[", text)}
        extras[str(project.parent.relative_to(ROOT))] = extras[name]
    found = 0
    for block, words in printed("pip"):
        for word in words[1:]:
            folder, _, extra = word.partition("[")
            if folder in extras and extra:
                assert {*extra.rstrip("]").split(",")} <= extras[folder], f"{block}: {word}"
            if not word.startswith(("-", ".", "plugins/")) and word != "constraints.txt":
                try:
                    requirement = Requirement(word)
                except InvalidRequirement:
                    raise AssertionError(f"{block}: {word}") from None
                if requirement.name.startswith("llmserve") and "acme" not in word:
                    found += 1
                    assert requirement.name in extras, f"{block}: {word}"
                    assert requirement.extras <= extras[requirement.name], f"{block}: {word}"
    assert found > 20


def test_what_make_makes_is_in_the_makefile() -> None:
    targets = {*re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))}
    found = [(block, word) for block, words in printed("make") for word in words if "=" not in word]
    assert len(found) > 10
    assert [f"{block}: {word}" for block, word in found if word not in targets] == []


def test_modules_that_are_run_are_there() -> None:
    text = "".join(
        path.read_text(encoding="utf-8") for path in {ROOT / b.page for b, _ in COMMANDS}
    )
    modules = {*re.findall(r"python3? -m ([\w.]+)", text)} - {"build"}
    assert len(modules) > 8
    assert [name for name in sorted(modules) if find_spec(name) is None] == []


def test_blocks_are_found_with_what_is_said_of_them() -> None:
    lines = ["# A title", "", "    llmserve build --model a \\", "        --name b"]
    lines += ["    curl 'x", "    y'", "", "text", "", "<!-- not run: it needs a GPU -->"]
    lines += ['```python title="a.py"', "a = 1", "", "b = 2", "```", ""]
    lines += ["    $ llmserve list", "    a  b", "", "    c", "", "done"]
    text = "\n".join(lines)
    first, second, third = blocks(text, "p.md")
    assert first.commands() == ["llmserve build --model a     --name b", "curl 'xy'"]
    assert (second.language, second.title, second.text) == ("python", "a.py", "a = 1\n\nb = 2")
    assert second.why_not == "it needs a GPU"
    assert (third.commands(), third.why_not, third.line) == (["llmserve list"], "", 17)


CHECKED = {"llmserve", "pip", "make", "cd", "pytest", "."}
"""Programs whose commands are checked here, or need no check."""


def needs_a_run(block: Block) -> bool:
    if block.language:
        return block.language == "python"
    others = (line for line in block.commands() if line.split()[0] not in CHECKED)
    return any(not re.match(r"python3? -m ", line) for line in others)


def test_each_block_of_code_is_run_or_says_why_not() -> None:
    needed = [block for block in all_blocks() if needs_a_run(block) and not block.why_not]
    assert len(needed) > 40
    assert [str(block) for block in needed if block.page not in RUN_BY] == []
    assert {block.page for block in needed} == {*RUN_BY}
    for page, test in RUN_BY.items():
        text = (ROOT / test).read_text(encoding="utf-8")
        assert "RUN_BY" in text or Path(page).name in text, (page, test)


def test_few_blocks_are_not_run() -> None:
    """And each has code or commands, so that the comment is no habit."""
    excused = [block for block in all_blocks() if block.why_not]
    assert [str(block) for block in excused if not needs_a_run(block)] == []
    assert len(excused) <= 12


def test_code_is_in_a_fence_of_its_language() -> None:
    for block in (block for block in all_blocks() if not block.language and not block.commands()):
        try:
            tree = ast.parse(block.text)
        except SyntaxError:
            continue
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not calls, f"{block}: begin it with ```python"


def test_settings_on_pages_can_be_read() -> None:
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    found = [block for block in all_blocks() if block.language == "toml"]
    assert found
    for block in found:
        toml.loads(block.text)


def test_the_waiting_times_of_the_guide_agree_with_theory() -> None:
    page = ROOT / "docs" / "guides" / "sizing.md"
    match = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert match
    names: dict[str, Any] = {}
    exec(match[1], names)
    waits = names["waits"]([1.0], 1, 0.5)
    # A single slot, half used, and requests that all take a second: a mean wait of half a second.
    assert sum(waits) / len(waits) == pytest.approx(0.5, rel=0.02)
    assert waits == sorted(waits)
