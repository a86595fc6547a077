"""What a shell completes in several commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click


def built_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from llmserve.builder.store import Store
    from llmserve.repository.repository import Repository

    del param
    repository = Repository.open(Path(ctx.params.get("repository") or "model_repository"))
    built = [model for model in repository if (model.folder / "config.pbtxt").is_file()]
    # The parts of an ensemble accept no requests of their own. Those of one that somebody wrote are
    # in its configuration, which takes long to read while a user types.
    parts = {part for model in built for part in model.built_with}
    names = [model.name for model in built if model.name not in parts]
    if not ctx.params.get("repository"):
        stored = [model.name for model in Store().models()]
        names += [name for name in stored if name not in names]
    return [name for name in names if name.startswith(incomplete)]
