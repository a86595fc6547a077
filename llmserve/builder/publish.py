"""Putting a finished model into its repository: all of it or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llmserve import modelconfig
from llmserve.builder import dockerfile
from llmserve.builder.needs import Needs
from llmserve.builder.staging import locked
from llmserve.builder.swap import MODELS, commit, swap, undo
from llmserve.errors import ConfigError, OutputError
from llmserve.manifest import Manifest, parts_of

_OTHER_NAME = "give another --name, or --force to replace"


def check_output(output: Path, names: Sequence[str], *, force: bool) -> None:
    """Refuse an output that holds something else, and models that are not ours to replace.

    The first of ``names`` is the model that was asked for, the others are its parts.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise OutputError(f"{output} is a file", mend="name a folder with --output")
    strangers = sorted(
        path.name
        for path in output.iterdir()
        if path.is_dir() and not path.name.startswith(".") and not _is_model(path)
    )
    if strangers:
        raise OutputError(
            f"{output} holds something else: {strangers[0]}/ is no Triton model",
            mend="name a new or empty folder with --output",
        )
    for name in {*names, *parts_of(output, names[0])}:
        if (output / name).exists():
            _check_target(output / name, names[0], force=force)


def _check_target(target: Path, name: str, *, force: bool) -> None:
    """Refuse to replace what somebody else made, has edited or needs."""
    try:
        manifest = Manifest.read(target)
    except ConfigError as error:
        if force:
            return
        raise OutputError(error.problem, mend=_OTHER_NAME) from None
    owner = manifest.part_of if manifest else ""
    if owner != name and target.name in parts_of(target.parent, owner or "."):
        raise OutputError(f"{target} is a part of {owner}", mend="give another --name")
    if force:
        return
    if manifest is None:
        raise OutputError(f"{target} was not built by llmserve", mend=_OTHER_NAME)
    if target.name != name and owner != name:
        raise OutputError(f"{target} is a model of its own", mend=_OTHER_NAME)
    edits = [line for line in manifest.differences(target) if not line.endswith("is missing")]
    if edits:
        raise OutputError(f"{target} was edited since it was built: {edits[0]}", mend=_OTHER_NAME)


def publish(stage: Path, output: Path, name: str, *, force: bool) -> None:
    """Move a stage's models into the repository, and its Dockerfile with them.

    Everything that can be refused is refused before anything moves; on any failure the old
    models stay or come back.
    """
    created = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        with locked(output):
            built = sorted(folder.name for folder in (stage / MODELS).iterdir())
            # What was asked for comes last: whoever sees it sees its parts.
            built.sort(key=lambda model: model == name)
            check_output(output, [name, *built], force=force)
            _move(stage, output, name, built)
    except BaseException as error:
        if created:
            with suppress(OSError):
                output.rmdir()
        if isinstance(error, OSError):
            raise OutputError(
                f"{output / name} cannot be written: {error.strerror or error}"
            ) from error
        raise


def _move(stage: Path, output: Path, name: str, built: Sequence[str]) -> None:
    old = {name, *built, *parts_of(output, name)}
    stale = sorted((model for model in old if (output / model).exists()), key=name.__ne__)
    manifests = {model: Manifest.read(stage / MODELS / model) for model in built}
    needs = {model: Needs.of(papers) for model, papers in manifests.items()}
    text = dockerfile.updated(output, needs, newest=name, gone=stale)
    draft = stage / f".{dockerfile.FILE}"
    if text is not None:
        draft.write_text(text, encoding="utf-8")
    try:
        swap(stage, output, built, stale)
        if text is not None:
            # At once or not at all: nobody reads half a Dockerfile.
            draft.replace(output / dockerfile.FILE)
        commit(stage)
    except BaseException:
        undo(stage, output)
        raise


def _is_model(folder: Path) -> bool:
    versions = (child for child in folder.iterdir() if child.is_dir() and child.name.isdigit())
    return (folder / modelconfig.FILE).is_file() or any(versions)
