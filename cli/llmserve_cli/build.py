"""``llmserve build``."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from llmserve.errors import ConfigError, ModelSourceError, OptionError, UsageError
from llmserve.server import find_servers
from llmserve_cli.building import (
    CONFIG,
    FIT,
    NAME,
    PLUGIN,
    SET,
    build_file,
    build_flags,
    build_options,
    may_change,
    with_suggestion,
)
from llmserve_cli.completion import model_sources
from llmserve_cli.interrupts import raise_on_interrupt, while_importing

if TYPE_CHECKING:
    from llmserve import BuildResult


class Build(click.Command):
    """The command, which accepts options of plugins as flags."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; a flag similar to a missing one is reported as a typo."""
        # The parser empties its list.
        words = list(args)
        if any(word.partition("=")[0] == "--config" for word in words):
            # The file names the models.
            args = [*args, "--model", ""]
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            missing = f"--{error.param.name}" if error.param else ""
            for flag in get_close_matches(missing, flags, cutoff=0.7):
                raise click.NoSuchOption(flag, possibilities=[missing], ctx=ctx) from None
            self._refuse_argument(ctx, words)
            raise UsageError(
                "build needs --model",
                hint="a local folder or GGUF file, a model's id on the Hugging Face hub, or demo",
            ) from None

    def _refuse_argument(self, ctx: click.Context, words: list[str]) -> None:
        """Refuse a model that is given without ``--model``, with the whole command."""
        remaining = self.make_parser(ctx).parse_args(list(words))[1]
        for before, word in zip(["", *remaining], remaining, strict=False):
            # What follows the flag of a plugin may be its value.
            if not word.startswith("-") and (not before.startswith("-") or "=" in before):
                corrected = list(words)
                position = corrected.index(word)
                corrected[position : position + 1] = ["--model", word]
                command = f"llmserve build {shlex.join(corrected)}"
                raise UsageError(f"build takes a model as --model: {command}") from None


@click.command(
    cls=Build, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@PLUGIN
@click.option(
    "--model",
    required=True,
    shell_complete=model_sources,
    help="Local folder or GGUF file, model id on the Hugging Face hub (ID:FILE.gguf for one of its "
    "GGUF files), or 'demo'.",
)
@CONFIG
@NAME
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("model_repository"),
    show_default=True,
    help="Model repository to write to.",
)
@build_flags
@click.option("--chat", is_flag=True, help="Apply the model's chat template to every prompt.")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=FOLDER",
    help="A LoRA adapter to serve by name, in PEFT's layout; a folder, or an id on the hub "
    "(repeatable).",
)
@SET
@FIT
@click.option(
    "--force", is_flag=True, help="Overwrite a model that was edited, or not built by llmserve."
)
@click.option(
    "--vendor",
    is_flag=True,
    help="Put the wheels of llmserve and of the plugins beside the Dockerfile, for its build.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
@click.option(
    "--verbose", is_flag=True, help="Also print how to query it and run it in a container."
)
@click.pass_context
def build(
    ctx: click.Context,
    /,
    assignments: tuple[str, ...],
    max_batch_size: int | None,
    dtype: str | None,
    device: str | None,
    chat: bool,
    adapters: tuple[str, ...],
    fit: bool | None,
    as_json: bool,
    verbose: bool,
    config: Path | None,
    **spec_fields: Any,
) -> None:
    """Build a model into a Triton repository.

    It also writes a client for the model, unless a layout of it has clients of its own, and prints
    the model's folder. A failed build leaves the repository unchanged.

    \b
    llmserve build --model gpt2 --device cpu
    llmserve build --plugin hf --model demo
    llmserve build --plugin hf --model gpt2 --max-batch-size 16 --dtype bfloat16
    llmserve build --plugin hf --model ./my-model --name mine --output models
    """
    if config is not None:
        _build_config(ctx, config, force=spec_fields["force"], fit=fit)
        return
    with while_importing():
        from llmserve.commands import Status
        from llmserve.plugin import BuildSpec, Registry, build_fitted

    if spec_fields["name"] == "":
        raise UsageError("--name is empty", hint="give a name, or leave it out")
    flags = {"max_batch_size": max_batch_size, "dtype": dtype, "device": device}
    more = {"chat": chat or None, "adapters": ",".join(adapters) or None}
    options = build_options(assignments, {**flags, **more, **read_flags(ctx.args)})
    registry = Registry.load()
    others: list[str] = []
    if not spec_fields["plugin"]:
        chosen_device = str(options.get("device", "auto"))
        recipe, reason = registry.recipe_for(chosen_device)
        others = [other.name for other in registry.recipes_for(chosen_device)[0][1:]]
        spec_fields["plugin"] = recipe.name
        click.echo(f"plugin: {recipe.name}, {reason}", err=True)
    spec = BuildSpec(**spec_fields, options=options)
    raise_on_interrupt(signal.SIGTERM)
    with Status(f"building {spec.model_name}") as status:
        try:
            _, result = build_fitted(
                spec, registry, others=others, serves=False,
                change=may_change(fit, chosen=True), report=status.update,
            )  # fmt: skip
        except ModelSourceError as error:
            raise with_suggestion(error, spec.model) from None
    if as_json:
        click.echo((result.folder / "llmserve.json").read_text(encoding="utf-8"), nl=False)
    else:
        click.echo(result.folder)
        _print_next(result, verbose)


def _build_config(ctx: click.Context, path: Path, *, force: bool, fit: bool | None) -> None:
    """Build the models of a file; what they are built from stands only there."""
    from llmserve.plugin import ServerFile

    flags = {param.name: max(param.opts, key=len) for param in ctx.command.params}
    others = [flags[name] for name in ctx.params if name in flags and _is_given(ctx, name)]
    others = [flag for flag in others if flag not in ("--config", "--model", "--force", "--fit")]
    if others := [*others, *ctx.args]:
        raise UsageError(
            f"--config says what to build, and {', '.join(others)} is given too",
            hint=f"write it into {path}",
        )
    file = ServerFile.read(path)
    if not file.models:
        raise ConfigError(f"{path} has no model", hint="add [models.NAME] with its source")
    for stored in build_file(file, serves=False, force=force, fit=fit):
        click.echo(stored.model.folder)
    start = f"llmserve serve --config {shlex.quote(str(path))}"
    _print_step(file.repository, [*file.models], start)


def _print_step(repository: Path, built: Sequence[str], start: str) -> None:
    """Print what to do now: a server that has this repository is not started again."""
    if running := find_servers(repository=repository):
        steps = " && ".join(f"llmserve reload {name}" for name in built)
        start = f"{steps}, in the server {running[0].url} that runs"
    click.echo(f"next: {start}", err=True)


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def read_flags(words: Sequence[str]) -> dict[str, str]:
    """Read options of a plugin from the remaining arguments; the build checks their names.

    >>> read_flags(["--engine", "./engine", "--build-engine", "--layout=engine"])
    {'engine': './engine', 'build_engine': 'true', 'layout': 'engine'}
    """
    options: dict[str, str] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        flag, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not flag:
            raise UsageError(f"{word!r} belongs to no option", hint="see llmserve build --help")
        name = flag.replace("-", "_")
        if not equals:
            # A flag without a value means true.
            has_value = bool(remaining) and not remaining[0].startswith("--")
            value = remaining.pop(0) if has_value else "true"
        if name in options:
            raise OptionError(f"--{flag} is given twice")
        options[name] = value
    return options


def _print_next(result: BuildResult, verbose: bool) -> None:
    from shlex import quote

    repository = quote(str(result.repository))
    argument = "" if repository == "model_repository" else f" {repository}"
    if result.manifest.trust_remote_code:
        click.echo(
            "note: trust_remote_code is on: the model runs Python code that ships with it", err=True
        )
    _print_step(result.repository, [result.name], f"llmserve serve{argument}")
    if verbose:
        client = result.folder / "client.py"
        asked = [
            f'then: llmserve query {result.name} "Once upon a time"',
            f'  or: python {quote(str(client))} "Once upon a time"',
        ]
        lines = [
            *(asked if client.exists() else ()),
            "in a container, instead of llmserve serve:",
            f"      {result.docker_build}",
            f"      {result.docker_run}",
        ]
        if result.without_index:
            names = ", ".join(result.without_index)
            lines.append(f"      (--vendor brings {names}, unless an index has them)")
        click.echo("\n".join(lines), err=True)
