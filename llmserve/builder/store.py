"""Built models that are kept in one place, for commands that are given a model and no repository.

Each model has a repository of its own, so that none depends on what another one was built with.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llmserve.builder.fitted import build_fitted
from llmserve.builder.home import home, make_private
from llmserve.builder.hub.listing import newest_commit
from llmserve.builder.hub.lookup import PROMPT
from llmserve.builder.plan import (
    BuildSpec,
    Plan,
    make_plan,
    needed_packages,
)
from llmserve.builder.source import is_demo, path_of
from llmserve.contract.names import MANIFEST
from llmserve.errors import ConfigError, ModelSourceError, OutputError, UsageError
from llmserve.names import check_model_name, is_model_name, model_name_from, near
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import MODEL_ROLES
from llmserve.repository.publish import check_removal, recover, remove
from llmserve.repository.repository import Model, Repository

Stamps = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Record:
    """What a kept model was asked to be built from, and how that looked on the disk."""

    model: str
    """An absolute path, or a name that does not depend on the folder one is in."""
    plugin: str
    """Empty if the plugin was not named."""
    components: Mapping[str, str]
    options: Mapping[str, Any]
    stamps: Stamps
    """The size and the time of change of each file of the model, and of those in options."""
    manifest: str = ""
    """The hash of the manifest that this record belongs to."""
    built: float = 0.0
    failed: str = ""
    """Why it could not be served when that was last tried."""
    fitted: Mapping[str, Any] = field(default_factory=dict)
    """The options, and the plugin, that were chosen for it to fit into this machine."""

    @classmethod
    def of(cls, spec: BuildSpec) -> Record:
        components = {role: name for role in MODEL_ROLES if (name := getattr(spec, role))}
        paths = [spec.model, *(v for v in spec.options.values() if isinstance(v, str))]
        stamps = {path: found for path in paths if (found := _stamps(path))}
        return cls(spec.model, spec.plugin, components, dict(spec.options), stamps)


@dataclass(frozen=True)
class StoredModel:
    """A model of the store."""

    model: Model
    record: Record | None
    """None if a build was interrupted between the model and its record."""
    is_new: bool = field(default=False, compare=False)
    """Whether it was built just now."""

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def repository(self) -> Path:
        return self.model.folder.parent

    def fits(self, record: Record, plan: Plan) -> bool:
        """Return whether a build of the same, with the packages of today, would be this one."""
        manifest, mine = self.model.manifest, self.record
        if manifest is None or mine is None or self.model.missing():
            return False
        # A source that is gone since has not changed.
        stamps = record.stamps or mine.stamps
        names = {role: part.get("name") for role, part in manifest.components.items()}
        return (
            (record.model, stamps) == (mine.model, mine.stamps)
            and manifest.recipe == plan.recipe.name
            and dict(manifest.options) == dict(plan.options)
            and names == {role: component.name for role, component in plan.components()}
            and needed_packages(plan).items() <= manifest.packages.items()
        )


class Store:
    """The kept models of this user, in a folder that nobody else may write to.

    With a ``repository``, the models are all in that one, and only their records are here.
    """

    def __init__(self, folder: Path | None = None, *, repository: Path | None = None) -> None:
        self.folder = folder or home()
        self.models_folder = self.folder / "models"
        self._repository = repository

    def place(self, name: str) -> Path:
        """Return the repository of a model."""
        return self._repository or self.models_folder / name

    def models(self) -> list[StoredModel]:
        """List the models by name."""
        if not self.models_folder.is_dir():
            return []
        names = sorted(path.name for path in self.models_folder.iterdir())
        return [kept for name in names if (kept := self.find(name))]

    def find(self, name: str) -> StoredModel | None:
        repository = self.place(name)
        model = Repository.open(repository).models.get(name) if is_model_name(name) else None
        return (
            None if model is None else StoredModel(model, _read_record(self._record(name), model))
        )

    def build(
        self,
        spec: BuildSpec,
        registry: Registry,
        *,
        report: Callable[[str], None] = lambda _: None,
        change: bool | None = False,
        serves: bool = True,
    ) -> StoredModel:
        """Return a model, built now unless the same one was built before.

        If the spec names no plugin, the best one for its device is used. Its ``force`` builds the
        model in any case, also if the files of the one before were edited. ``change`` is what
        :func:`~llmserve.builder.fit.fit_spec` may do for it to fit into this machine, and
        ``serves`` whether that serves it as well.
        """
        spec = self._located(self._recalled(spec))
        record, why = Record.of(spec), ""
        name = spec.model_name
        with self._locked(name, report):
            kept, update = self.find(name), ""
            # With None, it is as it was asked for, whatever was chosen before.
            fitted = {} if change is None else _fitted(record, kept)
            others: list[str] = []
            if not spec.plugin:
                device = str(spec.options.get("device", "auto"))
                recipe, why = registry.recipe_for(device)
                others = [other.name for other in registry.recipes_for(device)[0][1:]]
                spec = replace(spec, plugin=recipe.name)
            plan = make_plan(_with(spec, fitted), registry)
            if kept and not spec.force:
                if self._repository is None:
                    _refuse_other(kept, record)
                if kept.fits(record, plan):
                    update = _update_of(kept, str(plan.options["revision"]))
                    if not update:
                        return kept
                    report(update)
            if why:
                report(f"plugin: {spec.plugin}, {why}")
            try:
                choice, built = build_fitted(
                    spec, registry, others=others, serves=serves, change=change, report=report
                )
            except ModelSourceError as error:
                if not (kept and update):
                    raise
                report(f"{name} stays as it is: {error}")
                return kept
            record = replace(record, fitted=choice.chosen())
            _write_record(self._record(name), built.folder, record)
            model = Repository.open(built.repository).model(name)
            return StoredModel(model, _read_record(self._record(name), model), is_new=True)

    def recover(self) -> None:
        """Restore what a killed build had moved away in the one ``repository``."""
        if self._repository is not None:
            recover(self._repository)

    def removal(self, name: str, *, force: bool) -> list[str]:
        """Return the models that go with this one, itself first; refuse to delete what must stay.

        ``force`` also deletes a model that was edited, or not built by llmserve.
        """
        repository = self.place(name)
        recover(repository)
        return check_removal(repository, name, force=force)

    def remove(self, name: str, *, force: bool) -> None:
        """Delete a model, completely or not at all."""
        repository = self.place(name)
        if self._repository is not None:
            remove(repository, name, force=force)
            self.forget(name)
            return
        if self.find(name) is None:
            names = [kept.name for kept in self.models()]
            raise ConfigError(f"no model {name!r} in {self.models_folder}", hint=near(name, names))
        with self._locked(name):
            remove(repository, name, force=force)
            self.forget(name)
            with suppress(OSError):
                repository.rmdir()

    def note(self, stored: StoredModel, failed: str) -> None:
        """Keep why a model could not be served, or that it was: "". The list of models says so."""
        if stored.record is not None and stored.record.failed != failed:
            with suppress(OutputError):
                _replace(self._record(stored.name), replace(stored.record, failed=failed))

    def forget(self, name: str) -> None:
        """Delete the record of a model that is gone."""
        with suppress(OSError):
            self._record(name).unlink(missing_ok=True)

    @property
    def _records(self) -> Path:
        # Not in a repository, which may be copied to where no path of this machine has to be known.
        return self.folder / "records"

    def _record(self, name: str) -> Path:
        return self._records / f"{self._key(name)}.json"

    def _key(self, name: str) -> str:
        """Return what tells a model from those of the same name in other repositories."""
        if self._repository is None:
            return name
        place = hashlib.sha256(os.fsencode(self._repository.resolve())).hexdigest()
        return f"{name}-{place[:16]}"

    def _recalled(self, spec: BuildSpec) -> BuildSpec:
        """Complete the spec of a model that is meant by its name in the store.

        A path, a demo, and the id of a model that was built from the hub mean themselves.
        """
        is_itself = is_demo(spec.model) or self._repository is not None
        kept = None if is_itself else self.find(spec.model)
        record = kept and kept.record
        if not record or record.model == spec.model or path_of(spec.model).exists():
            return spec
        chosen: Any = {
            role: getattr(spec, role) or record.components.get(role) for role in MODEL_ROLES
        }
        return replace(
            spec,
            model=record.model,
            name=spec.name or spec.model,
            plugin=spec.plugin or record.plugin,
            options={**record.options, **spec.options},
            **chosen,
        )

    def _located(self, spec: BuildSpec) -> BuildSpec:
        """Return the spec with its place in the store, and the model as a path if it is one."""
        path = path_of(spec.model)
        is_path = bool(spec.model) and not is_demo(spec.model) and path.exists()
        model = os.path.normpath(path.absolute()) if is_path else spec.model
        name = check_model_name(spec.name or model_name_from(model))
        return replace(spec, model=model, name=name, output=self.place(name))

    @contextmanager
    def _locked(self, name: str, report: Callable[[str], None] = lambda _: None) -> Iterator[None]:
        """Let one process at a time build or delete a model of this name."""
        make_private(self.folder, "models", "locks", "records")
        lock = self.folder / "locks" / self._key(name)
        try:
            handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise OutputError(f"{lock} cannot be written: {error.strerror}") from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"waiting for another process that builds {name}")
                fcntl.flock(handle, fcntl.LOCK_EX)
            recover(self.place(name))
            yield
        finally:
            os.close(handle)


def _fitted(record: Record, kept: StoredModel | None) -> Mapping[str, Any]:
    """Return what was chosen when the same was built before.

    Otherwise whatever is free at the moment would decide whether it is built again.
    """
    mine = kept.record if kept else None
    facts = (record.model, record.plugin, record.components, record.options)
    is_same = mine and facts == (mine.model, mine.plugin, mine.components, mine.options)
    return mine.fitted if mine and is_same else {}


def _with(spec: BuildSpec, fitted: Mapping[str, Any]) -> BuildSpec:
    options = {name: value for name, value in fitted.items() if name != "plugin"}
    plugin = str(fitted.get("plugin", spec.plugin))
    return replace(spec, plugin=plugin, options={**spec.options, **options})


def _update_of(kept: StoredModel, revision: str) -> str:
    """Return what is new of a model that was built from the hub, or nothing."""
    source = kept.model.manifest.source if kept.model.manifest else {}
    if source.get("kind") != "hub" or revision == source["revision"]:
        return ""
    newest = newest_commit(source["id"], revision, timeout=PROMPT)
    if newest is None or newest == source["revision"]:
        return ""
    return f"{source['id']} has changed on the hub, from {source['revision'][:8]} to {newest[:8]}"


def _refuse_other(kept: StoredModel, record: Record) -> None:
    """Refuse to replace a model by one from elsewhere that only has the same name."""
    if kept.record is not None and kept.record.model != record.model:
        raise UsageError(
            f"the name {kept.name} is taken by {kept.record.model}",
            hint=f"give another --name, or delete that one: llmserve remove {kept.name}",
        )


def _stamps(text: str) -> dict[str, list[int]]:
    """Return the size and the time of change of a file, or of those in a folder; {} for neither."""
    try:
        path = Path(text)
        files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
        stats = {file.name: file.stat() for file in files if file.is_file()}
    except (OSError, ValueError):
        return {}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def _write_record(path: Path, folder: Path, record: Record) -> None:
    _replace(path, replace(record, manifest=_digest(folder), built=time.time()))


def _replace(path: Path, record: Record) -> None:
    draft = path.with_suffix(".new")
    try:
        draft.write_text(json.dumps(asdict(record), indent=2), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None


def _read_record(path: Path, model: Model) -> Record | None:
    """Read the record of a model; one that cannot be read, or is of another build, is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        record = Record(**content)
        is_of_this = record.manifest == _digest(model.folder)
        valid = isinstance(record.model, str) and isinstance(record.built, float)
    except (OSError, ValueError, TypeError):
        return None
    return record if is_of_this and valid else None
