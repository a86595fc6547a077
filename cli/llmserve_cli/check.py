"""``llmserve check``."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmserve.commands import print_json, print_table, printable
from llmserve.plugin import Problem
from llmserve_cli.terminal import size_in_words

if TYPE_CHECKING:
    from llmserve.plugin import Registry

_TREATMENTS = {"kept": "keeps its weights as they are", "widened": "widens its weights to 16 bits"}


@click.command()
@click.argument("repository", type=click.Path(path_type=Path), default=Path("model_repository"))
@click.option(
    "--passport",
    type=click.Path(path_type=Path),
    metavar="MODEL",
    help="Say what differs between two models: the folder of one is REPOSITORY.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def check(repository: Path, passport: Path | None, as_json: bool) -> int:
    """Find problems in a model repository.

    No server is needed. The exit code is 3 if a model would fail to load. Of a model that is not
    built yet, a folder or a GGUF file, it says how its weights are stored, which plugins compute
    them as they are, and how to serve it; the exit code is 3 if none does. With --passport, two
    models are compared instead, and 3 says that they differ.

    \b
    llmserve check model_repository
    llmserve check ./my-model
    llmserve check --passport old/gpt2 new/gpt2
    """
    if passport is not None:
        return _compare(passport, repository, as_json=as_json)
    from llmserve.plugin import Registry, Repository, Store, check_repository, is_unbuilt_model
    from llmserve.server import too_large

    if is_unbuilt_model(repository):
        return _show_weights(repository, Registry.load(), as_json=as_json)
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


def _show_weights(model: Path, registry: Registry, *, as_json: bool) -> int:
    """Print what the weights of a model are, and who takes them."""
    from llmserve.plugin import check_repository, weights_of

    found = weights_of(str(model), registry)
    (unbuilt,) = check_repository(model, registry)
    if as_json:
        print_json(asdict(found) if found else None)
    elif found is None:
        # A build says what is wrong.
        what = f"{unbuilt.message}, and how its weights are stored cannot be read"
        click.echo(printable(str(replace(unbuilt, message=what))))
    else:
        size = f"{found.parameters / 1e6:.1f} M weights in {size_in_words(found.bytes)}"
        click.echo(printable(f"{model}: {found.what}; {size}"))
        rows = [
            [f"  {taker.plugin}", _TREATMENTS[taker.treatment], _in_memory(taker.weights)]
            for taker in found.takers
        ]
        if rows:
            print_table(rows)
            click.echo(printable(f"to serve it: {unbuilt.hint}"))
        else:
            click.echo("no installed plugin computes them; see `llmserve plugins NAME`")
    return 0 if found and found.takers else 3


def _in_memory(weights: int) -> str:
    return f"{size_in_words(weights)} in memory" if weights else ""


def _as_json(problem: Problem) -> dict[str, Any]:
    """Return a problem under the names that scripts know."""
    words = {"model": problem.where, "what": problem.message, "mend": problem.hint}
    return {**words, "fatal": problem.fatal, "code": problem.code}
