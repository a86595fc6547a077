"""The options of ``llmserve serve`` that load models when a request needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmserve.commands import built_models
from llmserve.errors import LLMServeError, UsageError
from llmserve.plugin import near

if TYPE_CHECKING:
    from llmserve.plugin import Repository
    from llmserve.server import OnDemand, ServerSettings


class Amount(click.FloatRange):
    """A number that is one: every comparison with nan is false, so that no range refuses it."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{number} is no amount.", param, ctx)
        return number


_GB = 1e9
_SHARE_OF_FREE = 0.9
"""How much of the free memory models take at most, if nothing else is said."""
_OPTIONS = (
    click.option("--on-demand", is_flag=True, help="Load models when a request needs them."),
    click.option(
        "--max-loaded",
        type=click.IntRange(min=1),
        help="With --on-demand: how many models may be loaded at once.",
    ),
    click.option(
        "--memory",
        type=Amount(min=0, min_open=True),
        metavar="GB",
        help="With --on-demand: memory that all models may take (default: 90% of what is free, or "
        "no limit with --max-loaded).",
    ),
    click.option(
        "--unload-after",
        type=Amount(min=0, min_open=True),
        metavar="SECONDS",
        help="With --on-demand: unload a model that was not used for so long.",
    ),
    click.option(
        "--pin",
        "pinned",
        multiple=True,
        shell_complete=built_models,
        help="With --on-demand: load this model at the start, and keep it (repeatable).",
    ),
)
_Command = TypeVar("_Command", bound=Callable[..., Any])


def on_demand_options(command: _Command) -> _Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_on_demand(ctx: click.Context, options: dict[str, Any]) -> OnDemand | None:
    """Take the options out of all those of the command; None if models are loaded at the start."""
    from llmserve.server import OnDemand

    wanted = options.pop("on_demand")
    pinned = tuple(options.pop("pinned"))
    limits = {name: options.pop(name) for name in ("max_loaded", "memory", "unload_after")}
    if not wanted:
        given = [name for name, value in limits.items() if value is not None]
        # A file may say which models to pin once they are loaded on demand.
        by_file = ctx.get_parameter_source("pinned") is click.core.ParameterSource.DEFAULT_MAP
        given += ["pin"] if pinned and not by_file else []
        for name in given:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for models that are loaded when they are needed",
                             hint="add --on-demand, or leave it out")  # fmt: skip
        return None
    memory = limits.pop("memory")
    chosen = OnDemand(pinned=pinned, memory=memory and memory * _GB, **limits)
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


def at_start(
    settings: ServerSettings, repository: Repository, on_demand: OnDemand
) -> ServerSettings:
    """Return the settings of a server that starts with the pinned models only."""
    good = settings.models or repository.models
    pinned = repository.with_parts(name for name in on_demand.pinned if name in good)
    return replace(settings, models=pinned, empty=not pinned)


def check_runtime(settings: ServerSettings, repository: Repository) -> LLMServeError | None:
    """Return why this Triton cannot load models while it runs, if it cannot."""
    if settings.runtime == "docker":
        hint = "leave out --on-demand, or run llmserve in the container"
        return UsageError("a Triton in a container cannot load models while it runs", hint=hint)
    offered = settings.models or repository.models
    scripts = [m.name for m in repository if m.name in offered and m.has_launch_script]
    if scripts:
        what = f"{scripts[0]} starts a server of several processes, which cannot load models"
        return UsageError(f"{what} while it runs", hint="leave out --on-demand")
    return None
