"""Putting a finished model into its repository: all of it or nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from llmserve import modelconfig
from llmserve.builder import dockerfile
from llmserve.builder.staging import ASIDE, locked
from llmserve.errors import ConfigError, OutputError
from llmserve.manifest import Manifest


def check_output(output: Path, name: str, *, force: bool) -> None:
    """Refuse an output that holds something else, and a model that is not ours to replace."""
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
    target = output / name
    if not target.exists() or force:
        return
    try:
        manifest = Manifest.read(target)
    except ConfigError as error:
        raise OutputError(
            error.problem, mend="give another --name, or --force to replace"
        ) from None
    if manifest is None:
        raise OutputError(
            f"{target} was not built by llmserve", mend="give another --name, or --force to replace"
        )
    edits = [line for line in manifest.differences(target) if not line.endswith("is missing")]
    if edits:
        raise OutputError(
            f"{target} was edited since it was built: {edits[0]}",
            mend="give another --name, or --force to replace",
        )


def publish(staged: Path, output: Path, name: str, *, force: bool) -> None:
    """Move a staged model into the repository, and its Dockerfile with it.

    Everything that can be refused is refused before anything moves; on any failure the old
    model stays or comes back.
    """
    created = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        with locked(output):
            check_output(output, name, force=force)
            _move(staged, output, name)
    except BaseException as error:
        if created:
            with suppress(OSError):
                output.rmdir()
        if isinstance(error, OSError):
            raise OutputError(
                f"{output / name} cannot be written: {error.strerror or error}"
            ) from error
        raise


def _move(staged: Path, output: Path, name: str) -> None:
    manifest = Manifest.read(staged)
    text = dockerfile.updated(output, name, manifest.packages if manifest else {})
    draft = staged.parent / f".{dockerfile.FILE}"
    if text is not None:
        draft.write_text(text, encoding="utf-8")
    target, aside = output / name, staged.parent / ASIDE / name
    aside.parent.mkdir()
    try:
        if target.exists():
            target.rename(aside)
        staged.rename(target)
        if text is not None:
            # At once or not at all: nobody reads half a Dockerfile.
            draft.replace(output / dockerfile.FILE)
    except BaseException:
        # What has moved is seen in what is there: an interrupt may come between any two lines.
        if not staged.exists():
            target.rename(staged)
        if aside.exists():
            aside.rename(target)
        raise


def _is_model(folder: Path) -> bool:
    versions = (child for child in folder.iterdir() if child.is_dir() and child.name.isdigit())
    return (folder / modelconfig.FILE).is_file() or any(versions)
