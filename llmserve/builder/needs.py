"""What models need of the container that serves them, and which of them one image can serve."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmserve.errors import ConfigError
from llmserve.manifest import Manifest

PLAIN = ""
"""Stands for NVIDIA's plain image."""


@dataclass(frozen=True)
class Needs:
    """What a model needs; ``image`` is None where it is not known which one would do.

    ``parts`` are the models that have to be loaded before it. One that llmserve did not build is
    not ``told``: it goes wherever the others go.
    """

    packages: Mapping[str, str] = field(default_factory=dict)
    image: str | None = PLAIN
    brought: Sequence[str] = ()
    parts: Sequence[str] = ()
    told: bool = True

    @classmethod
    def of(cls, manifest: Manifest | None) -> Needs | None:
        """Read a manifest; None for a part, whose needs are those of the model it is part of."""
        if manifest is None:
            return cls(told=False)
        if manifest.part_of:
            return None
        return cls(manifest.packages, manifest.image, manifest.brought, manifest.parts)


def needs_of(
    repository: Path, *, without: Collection[str] = (), patient: bool = False
) -> dict[str, Needs]:
    """Return the needs of all models of a repository; ``patient`` takes a damaged manifest for
    none."""
    found = {}
    for folder in sorted(repository.iterdir()) if repository.is_dir() else ():
        if folder.name in without or folder.name.startswith(".") or not folder.is_dir():
            continue
        try:
            needs = Needs.of(Manifest.read(folder))
        except ConfigError:
            if not patient:
                raise
            needs = Needs(told=False)
        if needs:
            found[folder.name] = needs
    return found


def groups(models: Mapping[str, Needs]) -> tuple[dict[str, Needs], dict[str, Needs]]:
    """Return the models that the repository's image serves, and the others.

    Where they need different images it serves those of the plain one, which have no Dockerfile of
    their own; where there are none of these, those of the image whose name sorts last, which is
    NVIDIA's newest.
    """
    images = {needs.image for needs in models.values() if needs.told}
    chosen = PLAIN if PLAIN in images else max(images, key=lambda image: image or "", default=PLAIN)
    served = {
        name: needs for name, needs in models.items() if needs.image == chosen or not needs.told
    }
    return served, {name: needs for name, needs in models.items() if name not in served}
