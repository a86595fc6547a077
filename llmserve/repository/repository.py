"""A model repository and the models in it, read once and handed on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.contract.container import LAUNCH_SCRIPT
from llmserve.contract.passport import DECLARED as FINGERPRINT
from llmserve.errors import ConfigError
from llmserve.names import is_model_name
from llmserve.repository.manifest import ABOUT, Manifest, hashes

if TYPE_CHECKING:
    from llmserve.repository.config import ModelConfig


@dataclass(frozen=True)
class AdapterFiles:
    """The files of one adapter of a model, which may be replaced while that is served."""

    identity: str
    """Another one for other files of the same name."""
    changed: float
    """When the last of them came, in seconds since 1970."""


@dataclass(frozen=True)
class Model:
    """A model's folder; what it contains is read when it is first asked for, and only once.

    What cannot be read is None, and ``damage`` or ``config_damage`` says why: it must not keep
    other models from being served, nor from being listed.
    """

    folder: Path

    @property
    def about(self) -> tuple[str, ...]:
        """The files in its folder that are about it: llmserve's, and nothing that it runs with."""
        return ABOUT

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def _manifest(self) -> Manifest | ConfigError | None:
        try:
            return Manifest.read(self.folder)
        except ConfigError as error:
            return error

    @property
    def manifest(self) -> Manifest | None:
        """What it was built from; None if llmserve did not build it, and if that is damaged."""
        return self._manifest if isinstance(self._manifest, Manifest) else None

    @property
    def damage(self) -> ConfigError | None:
        """Why its manifest cannot be read."""
        return self._manifest if isinstance(self._manifest, ConfigError) else None

    @cached_property
    def _config(self) -> ModelConfig | ConfigError:
        from llmserve.repository import config

        try:
            return config.read(self.folder)
        except ConfigError as error:
            return error

    @property
    def config(self) -> ModelConfig | None:
        """Its ``config.pbtxt``."""
        return None if self.config_damage else self._config

    @property
    def config_damage(self) -> ConfigError | None:
        return self._config if isinstance(self._config, ConfigError) else None

    @property
    def fingerprint(self) -> str:
        """The short name of what its answers depend on; "" if it has none."""
        parameters = self.config.parameters if self.config is not None else {}
        # Reading a missing entry of a Protobuf map adds an empty one.
        return parameters[FINGERPRINT].string_value if FINGERPRINT in parameters else ""

    @property
    def state(self) -> tuple[int, int]:
        """What tells its folder from that of another build, as it is now; zeros if there is none.

        Who writes a model by hand edits its configuration in place, which its folder does not show.
        """
        from llmserve.repository.config import FILE

        try:
            folder = self.folder.stat()
        except OSError:
            return 0, 0
        changed = folder.st_mtime_ns
        with suppress(OSError):
            changed = max(changed, (self.folder / FILE).stat().st_mtime_ns)
        return folder.st_ino, changed

    def intact(self) -> Manifest | None:
        """Return its manifest; raise if that is damaged."""
        if self.damage:
            raise self.damage
        return self.manifest

    @cached_property
    def files(self) -> Mapping[str, str]:
        """The hash of each of its files, except the manifest."""
        return hashes(self.folder)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The models that must be loaded before this one, in this order.

        What others wrote has no manifest: the steps of its configuration are its parts.
        """
        if self.manifest or self.damage:
            return self.built_with
        return tuple(dict.fromkeys(_steps(self, (self.name,))))

    @property
    def built_with(self) -> tuple[str, ...]:
        """The parts that were built with it, and that go with it when it is replaced or removed.

        The steps of an ensemble that somebody wrote are models of their own: another may use them.
        """
        return tuple(self.manifest.parts) if self.manifest else ()

    @property
    def is_ensemble(self) -> bool:
        """Whether its parts run all of it: it has no process and no class of its own."""
        return bool(self.parts) and (self.config is None or self.config.platform == "ensemble")

    @property
    def is_python(self) -> bool:
        """Whether Triton's Python backend runs it, in processes of its own."""
        return self._backend == "python"

    @property
    def runs_in_triton(self) -> bool:
        """Whether another backend runs it, in Triton's own process unless it is a stand-in."""
        return self._backend not in ("", "python", "ensemble")

    @property
    def last_version(self) -> Path:
        """The folder of the version that Triton loads."""
        from llmserve.repository.config import versions

        found = versions(self.folder)
        return max(found, key=lambda folder: int(folder.name), default=self.folder / "1")

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that it has at the moment."""
        from llmserve.runtime.lora import adapter_names

        return tuple(adapter_names(self.last_version))

    def adapter_files(self, name: str) -> AdapterFiles | None:
        """Return what an adapter's files are now; None if it has none of that name."""
        from llmserve.runtime.lora import ADAPTERS, is_adapter_name

        if not is_adapter_name(name):
            return None
        try:
            folder = self.last_version / ADAPTERS / name
            states = [file.stat() for file in sorted(folder.iterdir())]
        except OSError:
            return None
        if not states:
            return None
        names = (f"{each.st_ino}.{each.st_mtime_ns}.{each.st_size}" for each in states)
        changed = max(each.st_ctime for each in (*states, folder.stat()))
        return AdapterFiles("-".join(names), changed)

    @property
    def _backend(self) -> str:
        from llmserve.repository import config

        return "" if self.config is None else config.backend_of(self.config)

    @property
    def part_of(self) -> str:
        """The model that this one is a part of, if any."""
        return self.manifest.part_of if self.manifest else ""

    def missing(self) -> list[str]:
        """Return the files of its manifest that are not there."""
        return self.manifest.missing(self.folder) if self.manifest else []

    def edits(self) -> list[str]:
        """Return which files were changed or added since the build."""
        return self.manifest.edits(self.folder) if self.manifest else []

    @property
    def references(self) -> list[str]:
        """The folders outside of the repository that it needs."""
        components: Iterable[Any] = self.manifest.components.values() if self.manifest else ()
        paths = {component["settings"].get("path", "") for component in components}
        return [path for path in sorted(paths) if path.startswith("/")]

    @property
    def has_launch_script(self) -> bool:
        """Whether its engine runs in several processes, which its own script starts."""
        return (self.folder / LAUNCH_SCRIPT).is_file()


def _steps(model: Model, within: tuple[str, ...]) -> Iterator[str]:
    """Yield the steps of an ensemble, those of the ensembles among them before these themselves.

    One that contains itself, which Triton refuses to load, must not end this.
    """
    for step in model.config.ensemble_scheduling.step if model.config is not None else ():
        # A name from a file is no path: Triton looks for it beside the ensemble.
        if step.model_name not in within and is_model_name(step.model_name):
            part = Model(model.folder.parent / step.model_name)
            yield from part.parts if part.manifest else _steps(part, (*within, part.name))
            yield part.name


@dataclass(frozen=True)
class Repository:
    """The models of a folder, by name, as it was when it was opened.

    >>> Repository.open(Path("no such folder")).models
    {}
    """

    path: Path
    models: Mapping[str, Model] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Repository:
        """List a folder's models; a folder that does not exist has none."""
        folders = sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else []
        return cls(path, {folder.name: Model(folder) for folder in folders})

    def __iter__(self) -> Iterator[Model]:
        return iter(self.models.values())

    def model(self, name: str) -> Model:
        """Return a model; one that is not here has no manifest and no configuration."""
        return self.models.get(name) or Model(self.path / name)

    def parts_of(self, name: str) -> tuple[str, ...]:
        """Return the models that must be loaded before this one; none if it is not here."""
        return self.models[name].parts if name in self.models else ()

    def built_with(self, name: str) -> tuple[str, ...]:
        """Return the parts that go with a model when it is removed; none if it is not here."""
        return self.models[name].built_with if name in self.models else ()

    def owner_of(self, name: str) -> str:
        """Return a model that this one is a part of, "" if there is none."""
        owners = (model.name for model in self if name in model.parts)
        return self.model(name).part_of or next(owners, "")

    def with_parts(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return models in loading order: a model's parts before itself."""
        return tuple(dict.fromkeys(part for name in names for part in (*self.parts_of(name), name)))

    def references(self, names: Iterable[str] | None = None) -> list[str]:
        """Return the folders outside of it that these models, or all, need."""
        chosen = self.models if names is None else names
        return sorted({path for name in chosen for path in self.model(name).references})


@dataclass(frozen=True)
class CheckedModel:
    """A model of a repository, as it is passed to the hook ``llmserve_check_model``.

    ``folder`` is the model's folder, ``config`` its ``config.pbtxt``, and ``configs`` those of all
    models of the repository by name.
    """

    folder: Path
    config: ModelConfig
    configs: Mapping[str, ModelConfig]

    @property
    def name(self) -> str:
        return self.folder.name
