"""Options of a build that several commands have, and the build of a model into the store."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmserve.errors import LLMServeError, ModelSourceError, OptionError, UsageError
from llmserve_cli.completion import component_names, local_sources, option_keys
from llmserve_cli.interrupts import raise_on_interrupt, while_importing

if TYPE_CHECKING:
    from llmserve.plugin import BuildSpec, Registry, ServerFile, Store, StoredModel

C = TypeVar("C", bound=Callable[..., Any])

PLUGIN = click.option(
    "--plugin",
    shell_complete=component_names,
    help="Plugin to build with (default: the best one for --device); see `llmserve plugins`.",
)
NAME = click.option("--name", help="Name to serve the model under (default: its own name).")
SET = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=option_keys,
    help="Set an option of the plugin, as --key VALUE does; see `llmserve plugins NAME`.",
)
CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Read models and options from this file; see docs/reference/llmserve.toml.md.",
)
FIT = click.option(
    "--fit/--no-fit",
    default=None,
    help="If it does not fit into this machine, build it so that it does, or nevertheless.",
)
_FLAGS = (
    click.option("--tokenizer", shell_complete=component_names, help="Use this tokenizer."),
    click.option("--generator", shell_complete=component_names, help="Use this generator."),
    click.option("--batching", shell_complete=component_names, help="Use this batching strategy."),
    click.option(
        "--formatter", "--format", shell_complete=component_names, help="Use this formatter."
    ),
    click.option(
        "--max-batch-size", type=int, help="Maximum batch size; 0 for no batch dimension."
    ),
    click.option(
        "--dtype", help="Data type of the weights in memory, such as float32 or bfloat16."
    ),
    click.option("--device", help="Device: cpu, cuda, cuda:N, balanced or auto."),
)


def build_flags(command: C) -> C:
    """Declare the options of a build that choose its components and how it is loaded."""
    for option in reversed(_FLAGS):
        command = option(command)
    return command


def build_options(assignments: Sequence[str], flags: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a build from ``--set`` and from flags; None is a flag not given."""
    from llmserve.plugin import parse_assignments

    options: dict[str, object] = dict(parse_assignments(assignments))
    for key, value in flags.items():
        if value is not None:
            if key in options:
                raise OptionError(f"{key} is given twice", hint="leave it out of --set")
            options[key] = value
    return options


def build_stored(
    model: str,
    *,
    name: str | None,
    plugin: str | None,
    assignments: Sequence[str] = (),
    force: bool = False,
    fit: bool | None = None,
    components: Mapping[str, Any] | None = None,
    **flags: object,
) -> StoredModel:
    """Return a model of the store; it is built if it is not there, or not from the same.

    If neither a plugin nor an option is asked for, it is built so that it fits into this machine.
    """
    with while_importing():
        from llmserve.plugin import BuildSpec, Registry, Store

    if name == "":
        raise UsageError("--name is empty", hint="give a name, or leave it out")
    options = build_options(assignments, flags)
    spec = BuildSpec(plugin or "", model, name, **(components or {}), options=options, force=force)
    chosen = bool(plugin or options or any((components or {}).values()))
    change = may_change(fit, chosen=chosen)
    return _build(spec, Store(), Registry.load(), change=change, serves=True)


def may_change(fit: bool | None, *, chosen: bool) -> bool | None:
    """Return what ``--fit`` and ``--no-fit`` mean for :func:`llmserve.builder.fit.fit_spec`."""
    if fit is None:
        return not chosen
    return True if fit else None


def build_file(
    file: ServerFile, *, serves: bool, force: bool = False, fit: bool | None = None
) -> list[StoredModel]:
    """Return the models of a file; those are built that are not there, or not from the same."""
    with while_importing():
        from llmserve.plugin import Registry, Store

    store, registry = Store(repository=file.repository), Registry.load()
    change = may_change(fit, chosen=True)
    stored = []
    for name, spec in file.models.items():
        try:
            spec = replace(spec, force=force)
            stored.append(_build(spec, store, registry, change=change, serves=serves))
        except LLMServeError as error:
            error.args = (f"{file.path}: models.{name}: {error}",)
            raise
    return stored


def _build(
    spec: BuildSpec, store: Store, registry: Registry, *, change: bool | None, serves: bool
) -> StoredModel:
    from llmserve.commands import Status

    raise_on_interrupt(signal.SIGTERM)
    with Status(f"preparing {spec.name or spec.model}") as status:
        try:
            stored = store.build(spec, registry, report=status.update, change=change, serves=serves)
        except ModelSourceError as error:
            raise with_suggestion(error, spec.model) from None
    if stored.is_new:
        click.echo(f"llmserve: {stored.name} is built", err=True)
    return stored


def with_suggestion(error: ModelSourceError, model: str) -> ModelSourceError:
    """Suggest the most similar model on this machine."""
    names = local_sources()
    similar = get_close_matches(model, names, n=1)
    # One file of a model has its name after a colon.
    if model.partition(":")[0] in names or not similar:
        return error
    return ModelSourceError(error.problem, hint=f"did you mean {similar[0]!r}?")
