"""The options of ``llmserve serve`` that load models when a request needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from llmserve.errors import UsageError
from llmserve.plugin import near
from llmserve.server import SERVE_OPTIONS

if TYPE_CHECKING:
    from llmserve.plugin import Repository
    from llmserve.server import OnDemand, ServeOptions


_GB = 1e9
_SHARE_OF_FREE = 0.9
"""How much of the free memory models take at most, if nothing else is said."""
_LIMITS = ("max_loaded", "memory", "unload_after")


def take_on_demand(ctx: click.Context, options: ServeOptions) -> OnDemand | None:
    """Return what the options say of it; None if models are loaded at the start."""
    from llmserve.server import OnDemand

    pinned = options.pinned
    if not options.on_demand:
        given = [name for name in _LIMITS if getattr(options, name) is not None]
        # A file may say which models to pin once they are loaded on demand.
        by_file = ctx.get_parameter_source("pinned") is click.core.ParameterSource.DEFAULT_MAP
        given += ["pinned"] if pinned and not by_file else []
        for name in given:
            option = SERVE_OPTIONS[name].flags[0]
            raise UsageError(f"{option} is for models that are loaded when they are needed",
                             hint="add --on-demand, or leave it out")  # fmt: skip
        return None
    chosen = OnDemand(
        options.max_loaded, options.memory and options.memory * _GB, options.unload_after, pinned
    )
    if chosen.max_loaded is not None and chosen.max_loaded < len(pinned):
        raise UsageError(
            f"{len(pinned)} models are pinned, and --max-loaded {chosen.max_loaded} allows fewer",
            hint="raise it, or pin fewer",
        )
    return chosen


def limited(on_demand: OnDemand) -> OnDemand:
    """Return the settings with a limit: what the machine has, if the user has given none."""
    from llmserve.runtime import memory

    free = memory().free * _SHARE_OF_FREE
    if on_demand.max_loaded or on_demand.memory or free == float("inf"):
        return on_demand
    click.echo(f"llmserve: note: the models may take {free / _GB:.1f} GB together (--memory)",
               err=True)  # fmt: skip
    return replace(on_demand, memory=free)


def offered_models(repository: Repository, models: Sequence[str], on_demand: OnDemand) -> list[str]:
    """Return the models that a request may name; raise for a pinned one that is none of them."""
    parts = {part for model in repository for part in model.parts}
    names = [name for name in models or repository.models if name not in parts]
    for name in on_demand.pinned:
        if name not in names:
            raise UsageError(f"--pin {name}: there is no such model", hint=near(name, names))
    return names
