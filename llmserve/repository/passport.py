"""The passport of a model on disk: which of its files, settings and packages make its answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from llmserve.contract.container import DOCKERFILE
from llmserve.contract.passport import PARTS, Passport
from llmserve.errors import ConfigError
from llmserve.repository import config as modelconfig
from llmserve.repository.manifest import Manifest
from llmserve.repository.repository import Repository
from llmserve.runtime.lora import ADAPTERS

_TEMPLATES = {"chat_template.jinja", "chat_template.json"}
_TEMPLATE = "chat_template"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_GENERATION = "generation_config.json"
_WRITTEN_BY = "transformers_version"
"""Which version of transformers wrote a file says nothing about what is in it."""
_LARGEST_READ = 1 << 20
_MOST_FILES = 3
"""How many files are named that differ."""
_LONGEST_SAID = 60


@dataclass(frozen=True)
class BuiltFiles:
    """A model or a part of one, with the hash of each of its files."""

    folder: Path
    manifest: Manifest
    hashes: Mapping[str, str]


def passport_of(models: Iterable[BuiltFiles]) -> Passport:
    """Return the passport of a model from its own files and those of its parts.

    Adapters are none of it: they come and go. Weights that the model has elsewhere are told apart
    by their files' names and sizes.
    """
    found: dict[str, list[Any]] = {name: [] for name in PARTS}
    models = sorted(models, key=lambda each: each.manifest.name)
    for model in models:
        manifest = model.manifest
        for part, path, digest in _contents(model):
            found[part].append([path, digest])
        found["defaults"].append(manifest.contract.get("defaults"))
        for role, component in sorted(manifest.components.items()):
            found["settings"].append([role, component["name"], _own(component["settings"])])
        found["engine"] += [manifest.recipe, dict(manifest.packages), manifest.image]
        found["engine"].append(_contract(manifest))
    # The names of parts begin with the model's, which says nothing about its answers.
    name = next(each.manifest.part_of or each.manifest.name for each in models)
    return Passport(**{part: _digest(content, name) for part, content in found.items()})


def built_files(folder: Path) -> list[BuiltFiles]:
    """Read a model on disk and its parts, as they are now and not as they were built."""
    repository = Repository.open(folder.parent)
    found = []
    for name in repository.with_parts([folder.name]):
        model = repository.model(name)
        if (manifest := model.intact()) is None:
            raise ConfigError(
                f"{model.folder} is no model that llmserve built",
                hint="name the folder of one, as in model_repository/NAME",
            )
        found.append(BuiltFiles(model.folder, manifest, model.files))
    return found


def differences(old: Path, new: Path) -> dict[str, list[str]]:
    """Return which parts of the passports of two models differ, and what of each, in words."""
    before, after = built_files(old), built_files(new)
    ours, theirs = passport_of(before), passport_of(after)
    found = {part: getattr(ours, part) != getattr(theirs, part) for part in PARTS}
    values = {
        "settings": (_settings(before), _settings(after)),
        "engine": (_versions(before), _versions(after)),
        "defaults": (_defaults(before), _defaults(after)),
    }
    files = _by_part(before), _by_part(after)
    return {
        part: _changes(*values.get(part, ({}, {}))) + _changed_files(files[0][part], files[1][part])
        for part, differs in found.items()
        if differs
    }


def _settings(models: Iterable[BuiltFiles]) -> dict[str, Any]:
    return {
        name: value
        for model in models
        for component in model.manifest.components.values()
        for name, value in _own(component["settings"]).items()
    }


def _versions(models: Sequence[BuiltFiles]) -> dict[str, Any]:
    packages = {name: said for model in models for name, said in model.manifest.packages.items()}
    manifest = models[-1].manifest
    contract = {f"contract's {name}": said for name, said in _contract(manifest).items()}
    return {"recipe": manifest.recipe, "image": manifest.image, **contract, **packages}


def _contract(manifest: Manifest) -> dict[str, Any]:
    return {name: said for name, said in manifest.contract.items() if name != "defaults"}


def _defaults(models: Sequence[BuiltFiles]) -> dict[str, Any]:
    found = dict(models[-1].manifest.contract.get("defaults") or {})
    for model in models:
        for path in model.hashes:
            if PurePosixPath(path).name == _GENERATION:
                found.update(_object(model.folder / path) or {})
    return found


def _by_part(models: Iterable[BuiltFiles]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for model in models:
        for part, path, digest in _contents(model):
            found[part][path] = digest
    return found


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {_said(before.get(name))} -> {_said(after.get(name))}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def _said(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _LONGEST_SAID else f"{text[:_LONGEST_SAID]}..."


def _changed_files(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    more = [f"and {len(names) - _MOST_FILES} more files"] if names[_MOST_FILES:] else []
    return [*names[:_MOST_FILES], *more]


def _own(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "path"}


def _contents(model: BuiltFiles) -> Iterator[tuple[str, str, Any]]:
    """Yield what each file of a model is a part of, its name, and a digest of what counts in it."""
    tokenizers = _paths(model.manifest, "tokenizer")
    for path, digest in sorted(model.hashes.items()):
        name, where = PurePosixPath(path).name, PurePosixPath(path).parts
        if path in (modelconfig.FILE, "client.py", DOCKERFILE) or ADAPTERS in where[1:-1]:
            continue
        content = _object(model.folder / path) if name.endswith(".json") else None
        if name in _TEMPLATES:
            yield "chat_template", name, digest
        elif name == _TOKENIZER_CONFIG:
            content = content or {}
            yield "chat_template", name, content.pop(_TEMPLATE, None)
            yield "tokenizer", path, _digest(content) if content else digest
        elif name == _GENERATION:
            yield "defaults", name, digest if content is None else _digest(content)
        elif name.endswith(".py"):
            yield "engine", path, digest
        elif len(where) > 2 and where[1] in tokenizers:
            yield "tokenizer", path, digest
        else:
            yield "weights", path, digest if content is None else _digest(content)
    for role, component in sorted(model.manifest.components.items()):
        path = component["settings"].get("path", "")
        if path.startswith("/") and Path(path).is_dir():
            sizes = {each.name: each.stat().st_size for each in Path(path).iterdir()}
            yield "tokenizer" if role == "tokenizer" else "weights", role, _digest(sizes)


def _paths(manifest: Manifest, role: str) -> set[str]:
    component = manifest.components.get(role)
    return {component["settings"].get("path", "")} - {""} if component else set()


def _object(path: Path) -> dict[str, Any] | None:
    """Return a JSON object without what wrote it; None if it is large, or something else."""
    try:
        if path.stat().st_size > _LARGEST_READ:
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    content.pop(_WRITTEN_BY, None)
    return content


def _digest(content: Any, without: str = "") -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    if without:
        text = text.replace(f'"{without}"', '""').replace(f'"{without}_', '"_')
    return hashlib.sha256(text.encode()).hexdigest()
