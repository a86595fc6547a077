"""``llmserve plugins``."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import click

from llmserve.commands import print_json, print_table, printable
from llmserve_cli.completion import component_names

if TYPE_CHECKING:
    from llmserve.plugin import Registry


@click.command()
@click.argument("name", required=False, shell_complete=component_names)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def plugins(name: str | None, as_json: bool) -> None:
    """List plugins, or the options of one.

    The second table shows where the code of each plugin comes from. A plugin that cannot be used
    is listed with the reason. LLMSERVE_PLUGINS lists the only plugins to load, and
    LLMSERVE_BLOCK_PLUGINS those not to load, by name or as DISTRIBUTION:NAME.

    \b
    llmserve plugins
    llmserve plugins hf
    """
    from llmserve.plugin import Registry

    registry = Registry.load()
    if name:
        _show_recipe(registry, name, as_json)
    elif as_json:
        print_json(
            {
                "components": _rows(registry),
                "plugins": _origins(registry),
                "problems": [
                    *map(str, registry.problems()),
                    *registry.unmatched_names(os.environ),
                ],
            }
        )
    else:
        columns = ("name", "role", "origin", "version", "summary")
        titles = ["NAME", "ROLE", "FROM", "VERSION", "WHAT IT IS"]
        print_table([titles, *([row[key] for key in columns] for row in _rows(registry))])
        click.echo()
        titles = ["PLUGIN", "FROM", "VERSION", "API", "ENTRY POINT", "PATH"]
        cells = (list(origin.values())[:6] for origin in _origins(registry))
        print_table([titles, *(["-" if c is None else str(c) for c in row] for row in cells)])
        # Names in the environment without a plugin are noted by every command.
        for problem in registry.problems():
            click.echo(printable(f"! {problem}"))


def _rows(registry: Registry) -> list[dict[str, str]]:
    # Recipes first: users choose from these.
    entries = sorted(registry.entries, key=lambda e: (e.role != "recipe", e.role))
    return [
        {
            "name": e.component.name,
            "role": e.role,
            "origin": e.plugin.origin,
            "version": e.plugin.version,
            "plugin": e.plugin.name,
            "summary": e.component.summary,
        }
        for e in entries
    ]


def _origins(registry: Registry) -> list[dict[str, Any]]:
    return [
        {
            "name": plugin.name,
            "distribution": plugin.origin,
            "version": plugin.version,
            "api": plugin.api,
            "entry_point": plugin.entry_point,
            "path": getattr(plugin.module, "__file__", None) or plugin.folder,
            "problem": plugin.problem,
        }
        for plugin in registry.plugins
    ]


def _show_recipe(registry: Registry, name: str, as_json: bool) -> None:
    from llmserve.plugin import MODEL_ROLES, checkpoints_taken, known_options

    recipe = registry.recipe(name)
    options = known_options(recipe, registry)
    taken = checkpoints_taken(recipe, registry)
    if as_json:
        from dataclasses import asdict

        described = [asdict(option) for option in options]
        print_json({"recipe": asdict(recipe), "options": described, "quantised": taken})
        return
    width = min(92, shutil.get_terminal_size().columns)
    click.echo(click.wrap_text(f"{recipe.name}: {recipe.summary}", width) + "\n")
    for role in MODEL_ROLES:
        click.echo(f"  {role:<10} {getattr(recipe, role)}")
    for treatment, forms in taken.items():
        if forms:
            click.echo(f"\nQuantised checkpoints that are {treatment}:\n")
            click.echo(click.wrap_text("; ".join(forms), width, "  ", "  "))
    click.echo("\nOptions (--set KEY=VALUE):\n")
    for option in options:
        default = str(option.default)
        default = default.lower() if isinstance(option.default, bool) else default
        click.echo(f"  {option.name}={default}")
        click.echo(click.wrap_text(option.help, width, "      ", "      "))
