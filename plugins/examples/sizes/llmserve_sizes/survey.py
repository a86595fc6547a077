"""Collects the sizes of a repository's models, and facts from their manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve.plugin import ConfigError, Model, Repository


@dataclass(frozen=True)
class ModelSize:
    """A model of a repository; one that llmserve did not build has no recipe and no packages."""

    name: str
    bytes: int
    recipe: str = "-"
    weights: str = "here"
    packages: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None


def survey(repository: Path) -> list[ModelSize]:
    """Return every model of a repository, by name."""
    if not repository.is_dir():
        raise ConfigError(f"no folder at {repository}", hint="name a model repository")
    models = Repository.open(repository)
    return [_size(model) for model in models if not model.name.startswith(".")]


def _size(model: Model) -> ModelSize:
    # A link into a cache counts with its target's size: that much is read when the model loads.
    size = sum(path.stat().st_size for path in model.folder.rglob("*") if path.is_file())
    if model.damage:
        return ModelSize(model.name, size, problem=str(model.damage))
    manifest = model.manifest
    if manifest is None:
        return ModelSize(model.name, size)
    generator = manifest.components.get("generator", {})
    return ModelSize(
        model.name,
        size,
        recipe=manifest.recipe,
        weights=_weights(generator.get("settings", {})),
        packages=dict(manifest.packages),
    )


def _weights(settings: Mapping[str, Any]) -> str:
    if "id" in settings:
        return f"hub {settings['id']}"
    path = str(settings.get("path", ""))
    return path if path.startswith("/") else "here"
