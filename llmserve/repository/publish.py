"""Moves a finished model into its repository, completely or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from llmserve.contract.container import DOCKERFILE
from llmserve.errors import ConfigError, OutputError
from llmserve.names import is_model_name, near
from llmserve.repository import config as modelconfig
from llmserve.repository import dockerfile
from llmserve.repository.repository import Model, Repository
from llmserve.repository.wheels import place, wheels_in

MODELS = "models"
"""The folder of a stage that contains the built models."""
WHEELS = "wheels"
"""The folder of a stage with wheels to be put beside the Dockerfile; it need not exist."""
ASIDE = ".replaced"
"""The folder of a stage that keeps the models that are being replaced."""
_JOURNAL = ".journal"


def replace_models(stage: Path, output: Path, fresh: Iterable[str], stale: Iterable[str]) -> None:
    """Move the models ``fresh`` from a stage to the repository, and ``stale`` out of it."""
    fresh = list(fresh)
    aside = stage / ASIDE
    aside.mkdir(exist_ok=True)
    draft = stage / f"{_JOURNAL}.new"
    draft.write_text(json.dumps(fresh), encoding="utf-8")
    draft.replace(stage / _JOURNAL)
    for name in stale:
        (output / name).rename(aside / name)
    for name in fresh:
        (stage / MODELS / name).rename(output / name)


def undo(stage: Path, output: Path) -> None:
    """Undo ``replace_models``, wherever it stopped: the files show which models have moved."""
    journal = stage / _JOURNAL
    if not journal.exists():
        return
    for name in filter(is_model_name, json.loads(journal.read_text(encoding="utf-8"))):
        staged = stage / MODELS / name
        if not staged.exists() and (output / name).exists():
            (output / name).rename(staged)
    for model in (stage / ASIDE).glob("*"):
        if not (output / model.name).exists():
            model.rename(output / model.name)
    journal.unlink()


@contextmanager
def staging(output: Path) -> Iterator[Path]:
    """Provide a temporary folder on the repository's file system, and delete it afterwards.

    It is next to the repository, not inside, because Triton does not start with a folder that is
    not a model. A killed build leaves its stage behind; the next build removes it, or the next
    command that reads the repository (:func:`recover`).
    """
    output = output.absolute()
    # Its name is known before it is there, so that it goes whenever Ctrl-C comes.
    folder = output.parent / f"{_prefix(output)}{token_hex(8)}"
    try:
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            try:
                output.parent.mkdir(parents=True, exist_ok=True)
                with locked(output.parent):
                    _sweep(output)
                    folder.mkdir(mode=0o700)
                    # The lock, which ends with its process, marks the stage as in use. A process id
                    # in its name would not work: another container's processes are not visible.
                    stack.enter_context(locked(folder))
            except OSError as error:
                raise OutputError(f"{output} cannot be written: {error.strerror}") from None
            yield folder
    except KeyboardInterrupt:
        # It may have come while the folder was being deleted.
        shutil.rmtree(folder, ignore_errors=True)
        raise


def recover(output: Path) -> None:
    """Restore the models that a killed build had moved away, if this user is allowed to."""
    output = output.absolute()
    with suppress(OSError), locked(output.parent):
        _sweep(output)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs; the folder itself is the lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _prefix(output: Path) -> str:
    return f".{output.name}.llmserve-build-"


def _sweep(output: Path) -> None:
    """Remove the stages of killed builds, and restore the models that they had moved away."""
    for stage in [p for p in output.parent.iterdir() if p.name.startswith(_prefix(output))]:
        try:
            handle = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(handle).st_uid != os.getuid():
                # No build of this user wrote its journal, so the journal is not trusted.
                continue
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if output.is_dir():
                with locked(output):
                    undo(stage, output)
            shutil.rmtree(stage, ignore_errors=True)
        except BlockingIOError:
            # Its build is still running.
            continue
        finally:
            os.close(handle)


_OTHER_NAME = "give another --name, or --force to replace"


def check_output(output: Path, names: Sequence[str], *, force: bool) -> None:
    """Refuse a folder that is not a model repository, and models that must not be replaced.

    The first of ``names`` is the requested model, the others are its parts.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise OutputError(f"{output} is a file", hint="name a folder with --output")
    repository = Repository.open(output)
    for model in repository:
        is_model = (model.folder / modelconfig.FILE).is_file() or modelconfig.versions(model.folder)
        if not is_model and not model.name.startswith("."):
            raise OutputError(
                f"{output} contains something else: {model.name}/ is not a Triton model",
                hint="name a new or empty folder with --output",
            )
    for name in {*names, *repository.built_with(names[0])}:
        if (output / name).exists():
            _check_target(repository, repository.model(name), names[0], force=force)


def _check_target(
    repository: Repository, model: Model, name: str, *, force: bool, hint: str = _OTHER_NAME
) -> None:
    """Refuse to replace a model that llmserve did not build, that was edited, or is needed."""
    if model.damage:
        if force:
            return
        raise OutputError(model.damage.problem, hint=hint)
    owner = model.part_of
    if owner != name and model.name in repository.built_with(owner):
        raise OutputError(f"{model.folder} is a part of {owner}", hint="give another --name")
    if force:
        return
    if model.manifest is None:
        raise OutputError(f"{model.folder} was not built by llmserve", hint=hint)
    if model.name != name and owner != name:
        raise OutputError(f"{model.folder} is a separate model", hint=hint)
    if edits := model.edits():
        raise OutputError(f"{model.folder} was edited since it was built: {edits[0]}", hint=hint)


def publish(stage: Path, output: Path, name: str, *, force: bool) -> None:
    """Move a stage's models into the repository, and its Dockerfile with them.

    All checks are made before anything moves; on any failure the old models stay or are
    restored.
    """
    created = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        with locked(output):
            built = sorted(folder.name for folder in (stage / MODELS).iterdir())
            # The requested model comes last: once it is visible, so are its parts.
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


def remove(output: Path, name: str, *, force: bool) -> None:
    """Delete a model with its parts, completely or not at all.

    Unless ``force`` is set, a model that was edited, or not built by llmserve, is not deleted.
    """
    try:
        with staging(output) as stage, locked(output):
            check_removal(output, name, force=force)
            (stage / MODELS).mkdir()
            _move(stage, output, name, [])
    except OSError as error:
        raise OutputError(f"{output / name} cannot be deleted: {error.strerror}") from error


def check_removal(output: Path, name: str, *, force: bool) -> list[str]:
    """Return the models that go with this one, itself first; refuse to delete what must stay."""
    repository = Repository.open(output)
    models = repository.models
    if name not in models:
        raise ConfigError(f"no model {name!r} in {output}", hint=near(name, models))
    owner = models[name].part_of
    if name in repository.built_with(owner):
        raise OutputError(f"{name} is a part of {owner}", hint=f"remove {owner} instead")
    present = [name, *(part for part in repository.built_with(name) if part in models)]
    hint = f"--force deletes {name} anyway"
    for each in present:
        _check_target(repository, models[each], name, force=force, hint=hint)
    if kept := _not_ours_to_change(output, present):
        raise OutputError(
            f"{output / name} cannot be deleted: this user cannot change {kept}",
            hint="do it as the user who owns it",
        )
    return present


def _not_ours_to_change(output: Path, names: Sequence[str]) -> Path | None:
    """Return a folder that keeps this user from deleting models, if there is one."""
    folders = [output, *(output / name for name in names)]
    for name in names:
        for path, below, _ in os.walk(output / name):
            folders += [Path(path, folder) for folder in below]
    may = os.W_OK | os.X_OK
    return next((f for f in folders if not os.access(f, may, effective_ids=True)), None)


def _move(stage: Path, output: Path, name: str, built: Sequence[str]) -> None:
    repository = Repository.open(output)
    replaced = {name, *built, *repository.built_with(name)}
    stale = sorted((model for model in replaced if (output / model).exists()), key=name.__ne__)
    staged = Repository.open(stage / MODELS).models
    manifests = {model: staged[model].intact() for model in built}
    wheels = wheels_in(stage / WHEELS)
    text = dockerfile.updated(repository, manifests, newest=name, removed=stale, wheels=wheels)
    draft = stage / f".{DOCKERFILE}"
    if text:
        draft.write_text(text, encoding="utf-8")
    try:
        replace_models(stage, output, built, stale)
        place(stage / WHEELS, output)
        if text:
            # Atomic, so that no one reads half a Dockerfile.
            draft.replace(output / DOCKERFILE)
        elif text is not None:
            (output / DOCKERFILE).unlink(missing_ok=True)
        # From here on nothing is moved back.
        (stage / _JOURNAL).unlink()
    except BaseException:
        undo(stage, output)
        raise
