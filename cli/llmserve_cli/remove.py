"""``llmserve remove``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmserve.commands import built_models
from llmserve.errors import ConfigError, ServerError, UsageError
from llmserve.plugin import near
from llmserve.server import REPOSITORY_FOLDER, Running, find_servers
from llmserve_cli.listing import folder_size

if TYPE_CHECKING:
    from llmserve.plugin import Store


@click.command()
@click.argument("model", shell_complete=built_models)
@click.option(
    "--repository",
    type=click.Path(path_type=Path, file_okay=False),
    help="Model repository that has it (default: model_repository, then LLMSERVE_HOME).",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--force",
    is_flag=True,
    help="Delete a model that was edited, not built by llmserve, or maybe served by a `serve` that "
    "does not answer.",
)
def remove(model: str, repository: Path | None, yes: bool, force: bool) -> int:
    """Delete a built model.

    A model that is served is unloaded first, and finishes its requests. What is in the hub's cache
    stays there. `llmserve list` shows what is built.

    \b
    llmserve remove demo
    """
    store = store_of(model, repository)
    repository = store.place(model)
    names = store.removal(model, force=force)
    servers = find_servers()
    if not force:
        _refuse_if_silent(servers, model)
    serving = [server for server in servers if server.serves(model, repository)]
    if not yes and not _confirmed(repository, names, serving):
        click.echo("llmserve: nothing is deleted", err=True)
        return 1
    for server in serving:
        _unload(server, model)
    store.remove(model, force=force)
    click.echo(f"llmserve: {repository / model} is deleted", err=True)
    return 0


def store_of(model: str, repository: Path | None) -> Store:
    """Return the store that has a model: that of a repository, or the one of this user."""
    from llmserve.plugin import Repository, Store

    here, store = Repository.open(repository or REPOSITORY_FOLDER), Store()
    if repository is not None or model in here.models:
        return Store(repository=here.path)
    if store.find(model):
        return store
    names = [*here.models, *(kept.name for kept in store.models())]
    hint = near(model, names) if names else "none is, and llmserve run MODEL builds one"
    raise ConfigError(f"no model {model!r} is built", hint=hint)


def _refuse_if_silent(servers: list[Running], model: str) -> None:
    """Refuse while a server does not say what it serves: it was stopped, or hangs."""
    for server in servers:
        if server.is_silent:
            raise ServerError(
                f"{server} does not answer, and may serve {model}",
                hint="continue it, or stop it (--force deletes the model anyway)",
            )


def _confirmed(repository: Path, names: list[str], serving: list[Running]) -> bool:
    model, *parts = names
    if not sys.stdin.isatty():
        raise UsageError(f"remove deletes {repository / model}", hint="confirm it with --yes")
    size = folder_size([repository / name for name in names])
    with_parts = f" with {', '.join(parts)}" if parts else ""
    served = f" It is served at {serving[0].url}, and unloaded first." if serving else ""
    question = f"Delete {repository / model}{with_parts} ({size / 1e6:.1f} MB)?{served}"
    return click.confirm(question, err=True)


def _unload(server: Running, model: str) -> None:
    from llmserve.commands import Status
    from llmserve.server import ask

    try:
        with Status(f"unloading {model}"):
            ask(server.socket, {"do": "unload", "model": model}, timeout=None)
    except ServerError as error:
        raise ServerError(
            f"{model} is served at {server.url}: {error.problem}",
            hint=f"stop `llmserve serve` (process {server.report.pid}) first",
        ) from None
