"""``llmserve.json``: what a model was built from and with, and the hash of each of its files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llmserve.contract.names import KNOWN_ANSWERS, MANIFEST, SCHEMA, public_runtime
from llmserve.contract.tasks import GENERATE
from llmserve.errors import ConfigError
from llmserve.names import is_model_name
from llmserve.packages import is_address

# Python writes this when a server loads a model; it is not an edit by the user.
_BYTECODE_FOLDER = "__pycache__"
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_IMAGE = re.compile(r"([a-z0-9][A-Za-z0-9._/:@-]*)?")
_RELEASE = re.compile(r"(\d\d\.\d\d)?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")


ABOUT = (MANIFEST, KNOWN_ANSWERS)
"""The files in a model's folder that are about the model."""


@dataclass(frozen=True)
class Manifest:
    """Describes a built model: the same inputs give the same manifest on any machine.

    Only a local model built with ``weights=reference`` has an absolute path in its manifest.
    """

    name: str
    recipe: str
    plugin: str
    exchange: str
    source: Mapping[str, Any]
    options: Mapping[str, Any]
    components: Mapping[str, Any]
    contract: Mapping[str, Any]
    packages: Mapping[str, str]
    trust_remote_code: bool
    llmserve: str
    part_of: str = ""
    """The model that this one is a part of, if any."""
    parts: Sequence[str] = ()
    """The other models of the repository that this one needs."""
    image: str | None = ""
    """The container image that it needs if NVIDIA's plain one is not sufficient; None if that image
    is not known."""
    triton: str = ""
    """The oldest release of Triton that such an image can have, if that is known."""
    brought: Sequence[str] = ()
    """The packages of that image which must not be replaced."""
    backends: Sequence[str] = ()
    """Triton's backends that it and its parts need, besides Python's."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """The addresses of packages that no index has: a commit, or an archive."""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """The versions of Python that packages ask for, if those exclude one in Triton's images."""
    files: Mapping[str, str] = field(default_factory=dict)
    schema: int = SCHEMA
    size: Mapping[str, Any] = field(default_factory=dict)
    """What decides how much memory it takes: the fields of ``ModelSize``."""

    @property
    def task(self) -> str:
        """What the model is for."""
        return str(self.contract.get("task", GENERATE))

    def write(self, folder: Path, files: Mapping[str, str] | None = None) -> None:
        """Write it with the hashes of its model's files, which are read if they are not given."""
        content = {**asdict(self), "files": hashes(folder) if files is None else dict(files)}
        text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read a model folder's manifest; None if it has none."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            schema = content["schema"]
            if schema == SCHEMA:
                return _validated(cls(**content))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise ConfigError(f"{path} is damaged", hint="build the model again") from None
        raise ConfigError(
            f"{path} has schema {schema}, this llmserve reads {SCHEMA}",
            hint="build the model again, or use the llmserve that built it",
        )

    def missing(self, folder: Path) -> list[str]:
        return [name for name in sorted(self.files) if not (folder / name).is_file()]

    def edits(self, folder: Path) -> list[str]:
        """Return which files were changed or added since the build."""
        return [
            f"{name} was {'changed' if name in self.files else 'added'}"
            for name, digest in hashes(folder).items()
            if self.files.get(name) != digest
        ]


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, except those that are about it."""
    about = {folder / name for name in ABOUT}
    return {
        path.relative_to(folder).as_posix(): _sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path not in about and _BYTECODE_FOLDER not in path.parts
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _validated(manifest: Manifest) -> Manifest:
    """Return the manifest if it has the structure that its readers rely on, else ValueError."""
    texts = (
        manifest.name, manifest.recipe, manifest.plugin, manifest.exchange, manifest.llmserve,
        manifest.part_of, *manifest.parts, *manifest.brought, *manifest.backends,
    )  # fmt: skip
    maps = (manifest.source, manifest.options, manifest.components, manifest.contract)
    parts = manifest.components.values() if isinstance(manifest.components, dict) else ()
    valid = (
        isinstance(manifest.parts, list | tuple)
        and isinstance(manifest.brought, list | tuple)
        and isinstance(manifest.backends, list | tuple)
        and all(isinstance(text, str) for text in texts)
        # A build replaces and removes the folders with these names.
        and all(is_model_name(part) for part in (*manifest.parts, manifest.part_of or "none"))
        and all(isinstance(content, dict) for content in maps)
        and all(_is_component(part) for part in parts)
        and _is_text_map(manifest.files)
        and _is_text_map(manifest.packages)
        # These are written into the Dockerfile.
        and (manifest.image is None or bool(_IMAGE.fullmatch(manifest.image)))
        and bool(_RELEASE.fullmatch(manifest.triton))
        and all(_PACKAGE.fullmatch(name) for name in manifest.packages)
        and all(_VERSION.fullmatch(version) for version in manifest.packages.values())
        and _is_text_map(manifest.pythons)
        and _is_text_map(manifest.origins)
        and all(is_address(address) for address in manifest.origins.values())
        and isinstance(manifest.trust_remote_code, bool)
    )
    if not valid:
        raise ValueError
    components = {
        role: {**part, "runtime": public_runtime(part["runtime"])}
        for role, part in manifest.components.items()
    }
    return replace(manifest, components=components)


def _is_component(part: object) -> bool:
    return (
        isinstance(part, dict)
        and isinstance(part.get("name"), str)
        and isinstance(part.get("runtime"), str)
        and isinstance(settings := part.get("settings"), dict)
        and isinstance(settings.get("path", ""), str)
    )


def _is_text_map(content: object) -> bool:
    return isinstance(content, dict) and all(isinstance(text, str) for text in content.values())
