"""What the shell completes: names that plugins register and models of a repository."""

from __future__ import annotations

import click


def recipe_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete ``--plugin``."""
    del ctx, param
    return _names("recipe", incomplete)


def component_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete an option that has the name of a role."""
    del ctx
    return _names(str(param.name), incomplete)


def _names(role: str, incomplete: str) -> list[str]:
    from llmserve.registry import Registry

    names = {e.component.name for e in Registry.load().entries if e.role == role}
    return sorted(name for name in names if name.startswith(incomplete))
