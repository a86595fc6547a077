"""``llmserve completion``, and what the shell completes."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete

_SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command()
@click.argument("shell", type=click.Choice([*_SHELLS]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    eval "$(llmserve completion bash)"
    """
    root = ctx.find_root().command
    click.echo(_SHELLS[shell](root, {}, "llmserve", "_LLMSERVE_COMPLETE").source())


def component_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete an option that has the name of a role, or is a recipe's."""
    from llmserve.registry import Registry
    from llmserve.roles import ROLES

    del ctx
    role = param.name if param.name in ROLES else "recipe"
    names = {entry.component.name for entry in Registry.load().entries if entry.role == role}
    return sorted(name for name in names if name.startswith(incomplete))


def option_keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete ``build --set`` with the options of the plugin that is named before it."""
    from llmserve.builder.plan import known_options
    from llmserve.registry import Registry

    del param
    registry = Registry.load()
    recipe = registry.recipe(ctx.params["plugin"])
    keys = (f"{option.name}=" for option in known_options(recipe, registry))
    return sorted(key for key in keys if key.startswith(incomplete))


def model_sources(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete ``build --model``: the demo model, those of the hub's cache, and folders."""
    del ctx, param
    known = [CompletionItem(name) for name in known_sources() if name.startswith(incomplete)]
    return [*known, CompletionItem(incomplete, type="dir")]


def known_sources() -> list[str]:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folders = cache.glob("models--*")
    return ["demo", *sorted(f.name.removeprefix("models--").replace("--", "/") for f in folders)]


def built_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from llmserve.repository.manifest import parts_of

    del param
    repository = Path(ctx.params.get("repository") or "model_repository")
    names = {path.parent.name for path in repository.glob("*/config.pbtxt")}
    # What an ensemble is made of is there for the ensemble.
    parts = {part for name in names for part in parts_of(repository, name)}
    return sorted(name for name in names - parts if name.startswith(incomplete))
