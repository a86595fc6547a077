"""What computes a model's answers, read from the repository that it was built into."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmserve.plugin import Repository

_MAX_HEADER = 64 << 20
# Settings that say where files are, and nothing about speed.
_PLACES = ("path", "pickle", "revision", "repo", "repo_id")
# Options whose effect is in the files alone.
_TYPES = ("dtype", "weight_format", "quantization")


def engine_of(repository: Path, model: str) -> str:
    """Return a model's generator with its settings, and the type of its weights; "" if unknown."""
    opened = Repository.open(repository)
    for name in (model, *opened.parts_of(model)):
        found = opened.models.get(name)
        if found and found.damage:
            return ""
        manifest = found.manifest if found else None
        part = manifest.components.get("generator") if manifest else None
        if manifest and part and not manifest.parts:
            types = {key: value for key, value in manifest.options.items() if key in _TYPES}
            settings = {**(part.get("settings") or {}), **types}
            facts = [
                f"{key} {_text(value)}"
                for key, value in settings.items()
                if key not in _PLACES and isinstance(value, (str, int, float)) and value != ""
            ]
            if weights := _weights_type(repository / name):
                facts.append(f"weights {weights}")
            return f"{part['name']} ({', '.join(facts)})" if facts else str(part["name"])
    return ""


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _weights_type(folder: Path) -> str:
    """Return the type of most stored parameters, in the words of safetensors, such as BF16."""
    sizes: Counter[str] = Counter()
    for path in folder.rglob("*.safetensors"):
        for tensor in _tensors(path):
            if isinstance(tensor, dict) and {"data_offsets", "dtype"} <= tensor.keys():
                # A file that others wrote may have anything there.
                with suppress(TypeError, ValueError):
                    begin, end = tensor["data_offsets"]
                    sizes[str(tensor["dtype"])] += end - begin
    return sizes.most_common(1)[0][0] if sizes else ""


def _tensors(path: Path) -> Iterator[Any]:
    """Yield the descriptions of tensors; a file that cannot be read has none."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= _MAX_HEADER else {}
    except (OSError, ValueError):
        return
    if isinstance(header, dict):
        yield from header.values()
