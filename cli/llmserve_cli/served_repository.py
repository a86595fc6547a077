"""What ``llmserve serve`` is given: a repository, a model, or a file that says all of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmserve.errors import ConfigError, ModelSourceError, UsageError
from llmserve.plugin import meaning_of, server_file_of
from llmserve.server import REPOSITORY_FOLDER, SERVE_OPTIONS
from llmserve_cli.building import build_file, build_stored

if TYPE_CHECKING:
    from llmserve.plugin import ServerFile


@dataclass(frozen=True)
class Asked:
    """How a model that ``serve`` is given is to be built; it is false if nothing is said."""

    plugin: str | None = None
    name: str | None = None
    assignments: tuple[str, ...] = ()
    fit: bool | None = None

    def __bool__(self) -> bool:
        return self != Asked()


def options_of(file: ServerFile) -> dict[str, Any]:
    """Return the options of the command that a file sets."""
    tables = {"serve": file.serve, "gateway": file.gateway}
    options = {
        row.name: tables[row.table][row.key]
        for row in SERVE_OPTIONS.values()
        if row.table and row.key in tables[row.table]
    }
    return {**options, "pinned": file.pinned} if file.pinned else options


def served_repository(
    ctx: click.Context,
    served: str,
    models: tuple[str, ...],
    asked: Asked,
) -> tuple[Path, tuple[str, ...]]:
    """Return the repository to serve and which of its models to load; build what is missing."""
    if (file := server_file_of(ctx)) is not None:
        return _built_of_file(file, models, asked)
    return _built_or_given(served, asked), models


def _built_of_file(
    file: ServerFile, models: tuple[str, ...], asked: Asked
) -> tuple[Path, tuple[str, ...]]:
    """Return the repository of a file, whose models are built if needed, and which to load."""
    if asked != Asked(fit=asked.fit):
        raise UsageError(
            "--plugin, --name and --set are for a model that is built",
            hint=f"write them into {file.path}",
        )
    build_file(file, serves=True, fit=asked.fit)
    return file.repository, models or (*file.models, *file.texts)


def _built_or_given(served: str, asked: Asked) -> Path:
    """Return the repository to serve; one of its own for a model, which is built if needed."""
    meaning, path = meaning_of(served), Path(served)
    is_model = meaning == "files"
    if not is_model and (path.exists() or served == str(REPOSITORY_FOLDER)):
        if asked:
            raise UsageError(
                "--plugin, --name, --set and --fit are for a model that is built",
                hint=f"{served} is a repository: leave them out",
            )
        _refuse_other(path)
        return path
    if not is_model:
        _refuse_other(path)
        if not meaning:
            return path
    try:
        return build_stored(
            served, name=asked.name, plugin=asked.plugin, assignments=asked.assignments,
            fit=asked.fit,
        ).repository  # fmt: skip
    except ModelSourceError as error:
        # Neither can be a repository, and the build says what is wrong with it.
        if meaning in ("files", "model"):
            raise
        problem = f"there is no folder {served}, and {error.problem}"
        raise ModelSourceError(problem, hint=error.hint) from None


def _refuse_other(path: Path) -> None:
    """Refuse what is not a repository, with the command that serves it."""
    in_default = REPOSITORY_FOLDER / path / "config.pbtxt"
    if not path.exists() and in_default.is_file():
        raise ConfigError(
            f"{path} is a model in {REPOSITORY_FOLDER}", hint=f"llmserve serve --model {path}"
        )
