"""``llmserve completion``, and the completions of options and arguments."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete

from llmserve.errors import PluginError

_SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command()
@click.argument("shell", type=click.Choice([*_SHELLS]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    \b
    eval "$(llmserve completion bash)"
    """
    root = ctx.find_root().command
    click.echo(_SHELLS[shell](root, {}, "llmserve", "_LLMSERVE_COMPLETE").source())


def component_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete an option with the components of the role that it names, or else with recipes."""
    from llmserve.plugin import Registry

    del ctx
    entries = Registry.load().entries
    role = param.name if param.name in {entry.role for entry in entries} else "recipe"
    names = {entry.component.name for entry in entries if entry.role == role}
    return sorted(name for name in names if name.startswith(incomplete))


def option_keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete ``build --set`` with the options of the plugin given before it, or by default."""
    from llmserve.plugin import Registry, known_options

    del param
    registry = Registry.load()
    try:
        name = ctx.params.get("plugin")
        recipe = registry.recipe(name) if name else registry.recipe_for("auto")[0]
        keys = [f"{option.name}=" for option in known_options(recipe, registry)]
    except PluginError:
        # The command itself reports it.
        return []
    return sorted(key for key in keys if key.startswith(incomplete))


def request_options(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete ``query --set`` with the options of requests that have no option of the command."""
    from llmserve.runtime.contract import OPTIONS

    del param
    flags = {other.name for other in ctx.command.params}
    rows = (row for row in OPTIONS.values() if row.set_by == "user" and row.name not in flags)
    return sorted(f"{row.name}=" for row in rows if row.name.startswith(incomplete))


def model_sources(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete ``build --model``: the demo models, models in the hub's cache, folders and files."""
    del ctx, param
    local = [CompletionItem(name) for name in local_sources() if name.startswith(incomplete)]
    return [*local, CompletionItem(incomplete, type="file")]


def what_to_serve(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete a model or a repository: the models of this machine, built or not, and folders."""
    from llmserve.plugin import Store

    stored = (model.name for model in Store().models())
    names = [name for name in stored if name.startswith(incomplete)]
    items = model_sources(ctx, param, incomplete)
    return [CompletionItem(name) for name in names if name not in [i.value for i in items]] + items


def local_sources() -> list[str]:
    from llmserve.plugin import DEMO_MODELS

    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folders = cache.glob("models--*")
    return [
        *DEMO_MODELS,
        *sorted(f.name.removeprefix("models--").replace("--", "/") for f in folders),
    ]
