"""``llmserve.json``: what a model was made from, by what, and the hash of every file of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmserve.errors import ConfigError

FILE = "llmserve.json"
SCHEMA = 1
# What a server leaves behind when it loads a model is nobody's edit.
_LEFT_BY_PYTHON = "__pycache__"


@dataclass(frozen=True)
class Manifest:
    """A model's papers. The same inputs give the same manifest: it holds no time and no path."""

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
    files: Mapping[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def write(self, folder: Path) -> None:
        """Write the manifest with the hash of every file beside it."""
        content = {**asdict(self), "files": hashes(folder)}
        text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read a model folder's manifest; None if it has none."""
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            schema = content["schema"]
            if schema == SCHEMA:
                return cls(**content)
        except (OSError, ValueError, TypeError, KeyError):
            raise ConfigError(f"{path} is damaged", mend="build the model again") from None
        raise ConfigError(
            f"{path} has schema {schema}, this llmserve reads {SCHEMA}",
            mend="build the model again, or use the llmserve that built it",
        )

    def differences(self, folder: Path) -> list[str]:
        """Say which files are not as they were built; a missing one is told as such."""
        now = hashes(folder)
        told = [
            f"{name} {'was changed' if name in now else 'is missing'}"
            for name, digest in sorted(self.files.items())
            if now.get(name) != digest
        ]
        return told + [f"{name} was added" for name in sorted(now.keys() - self.files.keys())]


def manifests(repository: Path) -> list[Manifest]:
    """Read the manifests of all models of a repository that have one."""
    found = (Manifest.read(folder) for folder in sorted(repository.iterdir()))
    return [manifest for manifest in found if manifest]


def references(repository: Path) -> list[Path]:
    """Return the folders outside of a repository that its models need."""
    paths = {
        settings["path"]
        for manifest in manifests(repository)
        for component in manifest.components.values()
        if str((settings := component["settings"]).get("path", "")).startswith("/")
    }
    return [Path(path) for path in sorted(paths)]


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, but for the manifest itself."""
    return {
        path.relative_to(folder).as_posix(): _sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / FILE and _LEFT_BY_PYTHON not in path.parts
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
