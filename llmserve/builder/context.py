"""What a component's ``prepare`` works with while a model is being built."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.options import Value
from llmserve.repository.source import PICKLED, WEIGHTS, ModelSource, SourceKind, resolve
from llmserve.repository.source_files import check_code, check_intact, check_links

if TYPE_CHECKING:
    # Plugins import this module to annotate their functions; protobuf is for those who build.
    from llmserve.repository.config import ModelConfig


MODEL_PY = "from llmserve.runtime.model import TritonPythonModel as TritonPythonModel\n"


@dataclass(frozen=True)
class Container:
    """The image that serves what is built, where NVIDIA's plain one will not do.

    A generator's ``prepare`` or ``assemble`` puts it into :attr:`BuildContext.container`. Packages
    that the image ``brings`` are never replaced; the others are installed without what they depend
    on. An ``image`` of None says that whoever builds the image has to name one.
    """

    image: str | None
    brings: tuple[str, ...] = ()


@dataclass
class BuildContext:
    """One model under construction.

    ``folder`` is its version folder, ``config`` its configuration so far, ``exchange`` how a
    client will talk to it, ``report`` a place to say what takes long, ``weights`` and
    ``source_kind`` what the generator takes for a model. ``container`` is what serves it, None
    for NVIDIA's plain one; of an ensemble's models the ensemble says it.
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

    @cached_property
    def source(self) -> ModelSource:
        """The model that ``--model`` names, found when it is first asked for."""
        return resolve(
            self.model,
            revision=str(self.options["revision"]),
            weights=(*self.weights, PICKLED) if self.options["pickle"] else self.weights,
            kind=self.source_kind,
            report=self.report,
        )

    def sibling(self, name: str, config: ModelConfig) -> BuildContext:
        """Return the context of another model of the same build, beside this one."""
        folder = self.folder.parent.parent / name / self.folder.name
        other = replace(self, name=name, folder=folder, config=config, exchange="unary")
        # The same model is looked for once.
        other.__dict__["source"] = self.source
        return other

    def streams(self) -> None:
        """Let the model send a request's answer in pieces: as a decoupled model, to which clients
        talk over gRPC streams and ``/generate_stream``."""
        self.config.model_transaction_policy.decoupled = True
        self.exchange = "stream"

    def write_entry(self) -> None:
        """Write the one line that makes Triton's Python backend run our runtime."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "model.py").write_text(MODEL_PY, encoding="utf-8")

    @property
    def copies_weights(self) -> bool:
        """Whether files go into the repository: local ones do, the hub's stay in its cache."""
        asked = self.options["weights"]
        return asked == "copy" or (asked == "auto" and self.source.repo_id is None)

    def place(
        self, files: Iterable[Path], folder: str, *, copy: bool | None = None
    ) -> dict[str, Value]:
        """Put the source's files where the runtime finds them, and say where that is.

        Damaged files, and links that lead out of the model, are refused. ``copy`` is for a runtime
        that opens files by itself and knows nothing of the hub: they are copied whatever the build
        says of weights. Returns the settings that ``llmserve.runtime.location`` reads: a folder in
        the repository, or the hub's id and commit, or a path outside.
        """
        files = list(files)
        check_links(files, self.source.path)
        check_intact(files)
        settings: dict[str, Value] = {}
        if self.options["trust_remote_code"]:
            check_code(files)
            settings["trust_remote_code"] = True
        if self.copies_weights if copy is None else copy:
            target = self.folder / folder
            target.mkdir(parents=True, exist_ok=True)
            for file in files:
                if file.suffix == ".py" and not self.options["trust_remote_code"]:
                    continue
                if file.stat().st_size > 1 << 28:
                    self.report(f"copying {file.name}")
                shutil.copyfile(file, target / file.name)
            return {**settings, "path": folder}
        if self.source.repo_id and self.source.revision:
            return {**settings, "id": self.source.repo_id, "revision": self.source.revision}
        return {**settings, "path": str(self.source.path)}
