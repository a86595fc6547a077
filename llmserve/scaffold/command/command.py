"""The command ``llmserve scaffold``."""

from __future__ import annotations

from pathlib import Path

import click

from llmserve.plugin import Repository, UsageError, section


@section("Extend")
@click.command("scaffold")
@click.argument("repository", type=click.Path(path_type=Path), default=Path("model_repository"))
def main(repository: Path) -> None:
    """List the models of a repository."""
    if not repository.is_dir():
        raise UsageError(f"no folder at {repository}", hint="name a model repository")
    for model in Repository.open(repository):
        manifest = model.intact()
        click.echo(f"{model.name}: {manifest.recipe if manifest else 'not built by llmserve'}")
