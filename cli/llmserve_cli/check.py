"""``llmserve check``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmserve.commands import print_json, printable
from llmserve.plugin import Problem


@click.command()
@click.argument("repository", type=click.Path(path_type=Path), default=Path("model_repository"))
@click.option(
    "--passport",
    type=click.Path(path_type=Path),
    metavar="MODEL",
    help="Say what differs between two models: the folder of one is REPOSITORY.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the problems as JSON.")
def check(repository: Path, passport: Path | None, as_json: bool) -> int:
    """Find problems in a model repository.

    No server is needed. The exit code is 3 if a model would fail to load. With --passport, two
    models are compared instead, and 3 says that they differ.

    \b
    llmserve check model_repository
    llmserve check --passport old/gpt2 new/gpt2
    """
    if passport is not None:
        return _compare(passport, repository, as_json=as_json)
    from llmserve.plugin import Registry, Repository, Store, check_repository
    from llmserve.server import too_large

    Store(repository=repository).recover()
    registry = Registry.load()
    problems = check_repository(repository, registry)
    if repository.is_dir():
        found = (too_large(model, registry) for model in Repository.open(repository))
        problems += filter(None, found)
    if as_json:
        print_json([_as_json(problem) for problem in problems])
    else:
        for problem in problems:
            click.echo(printable(f"{'' if problem.fatal else 'note: '}{problem}"))
        if not problems:
            click.echo(f"{repository}: no problems found", err=True)
    return 3 if any(problem.fatal for problem in problems) else 0


def _compare(old: Path, new: Path, *, as_json: bool) -> int:
    from llmserve.plugin import differences

    found = differences(old, new)
    if as_json:
        print_json(found)
    elif not found:
        click.echo("nothing differs that answers depend on")
    for part, changes in {} if as_json else found.items():
        click.echo(printable(f"{part.replace('_', ' ')}: {', '.join(changes)}"))
    return 3 if found else 0


def _as_json(problem: Problem) -> dict[str, Any]:
    """Return a problem under the names that scripts know."""
    words = {"model": problem.where, "what": problem.message, "mend": problem.hint}
    return {**words, "fatal": problem.fatal, "code": problem.code}
