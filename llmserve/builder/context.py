"""The build context that is passed to a component's ``prepare``."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.builder.source import (
    PICKLED,
    WEIGHTS,
    ModelSource,
    SourceKind,
    resolve,
)
from llmserve.builder.source_files import (
    check_code,
    check_intact,
    check_links,
    config_files,
)
from llmserve.errors import ModelSourceError, OptionError, OutputError, PluginError
from llmserve.names import check_model_name
from llmserve.plugins.options import Value
from llmserve.plugins.quantised import Quantised, Treatment, by_transformers

if TYPE_CHECKING:
    # Plugins import this module for annotations, which must not load protobuf.
    from llmserve.contract.tensors import Tensor
    from llmserve.repository.config import ModelConfig


MODEL_PY = "from llmserve.runtime.model import TritonPythonModel as TritonPythonModel\n"


@dataclass(frozen=True)
class Container:
    """The container image that serves a model if NVIDIA's plain image is not sufficient.

    A generator's ``prepare`` or ``assemble`` stores it in :attr:`BuildContext.container`. Packages
    that the image ``brings`` are never replaced; the others are installed without dependencies.
    If ``image`` is None, the user must name a base image with ``--build-arg``; ``triton`` is then
    the oldest release that it can have, such as 25.08. Without it, it may be as old as any.
    """

    image: str | None
    brings: tuple[str, ...] = ()
    triton: str = ""


@dataclass
class BuildContext:
    """One model under construction.

    ``folder`` is its version folder, ``config`` its configuration so far, ``exchange`` how clients
    talk to it, ``report`` prints progress, ``weights`` and ``source_kind`` are the generator's
    ``weights`` and ``source``. ``container`` is the image that serves the model, None for NVIDIA's
    plain one; for an assembly, set it on the context of the assembly itself.
    """

    name: str
    model: str
    options: Mapping[str, Value]
    folder: Path
    config: ModelConfig
    report: Callable[[str], None]
    exchange: str = "unary"
    weights: Sequence[str] = (WEIGHTS,)
    source_kind: SourceKind = "huggingface"
    container: Container | None = None
    keeps_gguf: bool = False
    """Whether the generator reads weights of a GGUF file itself, as ``KeptWeights`` lists them."""
    quantised: Callable[[Quantised], Treatment] = by_transformers
    """What the generator does with a checkpoint that is quantised in such a way."""
    scratch: Path | None = None
    """Where the build keeps what it deletes when it ends."""
    parts: dict[str, BuildContext] = field(default_factory=dict, init=False)
    """The models that :meth:`add_part` has added."""
    taken: list[Tensor] = field(default_factory=list, init=False)
    """The inputs that this model has beside those of its components."""
    required: set[str] = field(default_factory=set, init=False)
    """The distributions that this model needs beside those of its components."""

    @cached_property
    def source(self) -> ModelSource:
        """The model that ``--model`` names, located on first use.

        One that would fetch code is refused here, whatever the plugin then does with it. A GGUF
        file is converted to a folder.
        """
        source = resolve(
            self.model,
            revision=str(self.options["revision"]),
            weights=(*self.weights, PICKLED) if self.options["pickle"] else self.weights,
            kind=self.source_kind,
            report=self.report,
        )
        if self.source_kind == "huggingface" and source.path.is_file():
            source = self._converted(source)
        # Beside a single file is what happens to be in its folder.
        files = [] if self.source_kind == "file" else config_files(source.folder)
        check_code(files, trusted=bool(self.options["trust_remote_code"]))
        return source

    def _converted(self, source: ModelSource) -> ModelSource:
        from llmserve.builder.gguf.conversion import converted

        if self.options["weights"] == "reference":
            raise OptionError(
                f"{source.asked} is converted, so its weights cannot stay where they are",
                hint="leave out weights=reference",
            )
        if self.scratch:
            self.scratch.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="gguf-", dir=self.scratch))
        return converted(source, folder, self.report, keeps=self.keeps_gguf)

    def add_part(
        self,
        suffix: str = "",
        *,
        name: str | None = None,
        backend: str = "",
        platform: str = "",
        max_batch_size: int | None = None,
    ) -> BuildContext:
        """Start another model, which this one calls: ``NAME_suffix``, or ``name`` if it is given.

        The caller configures it, and puts files into its ``folder``; it is loaded before this one.
        The default of ``max_batch_size`` is that of this model. A generator with ``assemble`` adds
        models to its assembly instead.
        """
        from llmserve.repository.config import new_config

        name = check_model_name(name or f"{self.name}_{suffix}")
        if name in self.parts or name == self.name:
            raise PluginError(f"two models of one build are called {name!r}")
        size = self.config.max_batch_size if max_batch_size is None else max_batch_size
        config = new_config(name, backend=backend, max_batch_size=size)
        config.platform = platform
        folder = self.folder.parent.parent / name / self.folder.name
        part = replace(self, name=name, folder=folder, config=config, exchange="unary")
        # All models of a build share the source, which is located only once.
        part.__dict__["source"] = self.source
        part.folder.mkdir(parents=True)
        self.parts[name] = part
        return part

    def take(self, tensor: Tensor, *, requires: Iterable[str] = ()) -> None:
        """Add an input that only some models of the generator have, and what it needs for that."""
        from llmserve.repository.config import add_inputs

        self.taken.append(tensor)
        self.required.update(requires)
        add_inputs(self.config, [tensor])

    def streams(self) -> None:
        """Make the model decoupled, so that it sends answers in pieces; clients then use gRPC
        streams and ``/generate_stream``."""
        self.config.model_transaction_policy.decoupled = True
        self.exchange = "stream"

    def write_entry(self) -> None:
        """Write the ``model.py`` through which Triton's Python backend runs our runtime."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "model.py").write_text(MODEL_PY, encoding="utf-8")

    @property
    def copies_weights(self) -> bool:
        """Whether files are copied into the repository; by default, the hub's stay in its cache."""
        weights = self.options["weights"]
        return weights == "copy" or (weights == "auto" and self.source.repo_id is None)

    def place(
        self, files: Iterable[Path], folder: str, *, copy: bool | None = None
    ) -> dict[str, Value]:
        """Put the source's files where the runtime finds them, and return their location.

        Damaged files, and links that lead out of the model, are refused. ``copy=True`` is for a
        runtime that opens files itself and cannot use the hub: they are copied whatever the option
        ``weights`` says. Returns the settings that ``llmserve.runtime.location`` reads: a folder in
        the repository, or the hub's id and commit, or a path outside.
        """
        files = list(files)
        check_links(files, self.source.folder)
        check_intact(files)
        settings: dict[str, Value] = {}
        check_code(files, trusted=bool(self.options["trust_remote_code"]))
        if self.options["trust_remote_code"]:
            settings["trust_remote_code"] = True
        if self.copies_weights if copy is None else copy:
            target = self.folder / folder
            target.mkdir(parents=True, exist_ok=True)
            self._check_space(files, target)
            for file in files:
                if file.suffix == ".py" and not self.options["trust_remote_code"]:
                    continue
                self._put(file, target / file.name)
            return {**settings, "path": folder}
        if self.source.converted_from:
            raise ModelSourceError(
                f"{self.source.asked} is converted for the build alone, and here it would be read "
                "after it",
                hint="name a folder with config.json and safetensors",
            )
        if self.source.repo_id and self.source.revision:
            return {**settings, "id": self.source.repo_id, "revision": self.source.revision}
        return {**settings, "path": str(self.source.folder)}

    def _check_space(self, files: Iterable[Path], target: Path) -> None:
        """Refuse what the disk has no space for, before minutes go into copying it."""
        if self.source.converted_from:
            return
        needed, free = sum(file.stat().st_size for file in files), shutil.disk_usage(target).free
        if free < needed:
            raise OutputError(
                f"the files of {self.source.asked} take {needed / 1e6:.0f} MB, and the disk of the "
                f"repository has {free / 1e6:.0f} MB free",
                hint="make some space, build to another disk, or leave them where they are with "
                "--set weights=reference",
            )

    def _put(self, file: Path, target: Path) -> None:
        """Copy a file into the repository. Weights of a folder that is deleted after the build are
        linked, so that they are not on the disk twice."""
        if self.source.converted_from and file.match(WEIGHTS):
            with suppress(OSError):
                os.link(file, target)
                return
        if file.stat().st_size > 1 << 28:
            self.report(f"copying {file.name}")
        try:
            shutil.copyfile(file, target)
        except OSError as error:
            raise OutputError(
                f"{file.name} cannot be copied to the repository: {error.strerror}",
                hint="make some space, build to another disk, or leave it where it is with --set "
                "weights=reference",
            ) from None
