"""What is asked of a build, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmserve.manifest import Manifest
from llmserve.naming import check_model_name, model_name_from

DEFAULT_OUTPUT = Path("model_repository")


@dataclass(frozen=True)
class BuildSpec:
    """One model to build: a recipe, a model, and what departs from the recipe's defaults."""

    plugin: str
    model: str
    name: str | None = None
    output: Path = DEFAULT_OUTPUT
    tokenizer: str | None = None
    batching: str | None = None
    formatter: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    force: bool = False

    @property
    def model_name(self) -> str:
        """The name under which Triton serves the model."""
        return check_model_name(self.name or model_name_from(self.model))


@dataclass(frozen=True)
class BuildResult:
    """A model that was built: where it lies and what its manifest says."""

    name: str
    repository: Path
    manifest: Manifest
    dockerfile: Path
    docker_build: str
    docker_run: str

    @property
    def folder(self) -> Path:
        """The model's folder in the repository."""
        return self.repository / self.name
