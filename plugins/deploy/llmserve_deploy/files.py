"""Rendering and writing of files: deterministic, and without touching other files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from llmserve.errors import OutputError
from llmserve_deploy.description import KEYS_FILE

_TOOLS = re.compile(r"(^|/)(\.|__pycache__/)")
"""Files that git, Python and file managers leave in a folder."""


def rendered(files: Mapping[str, Any]) -> dict[str, bytes]:
    """Return files by their path: text unchanged, data as YAML or JSON, depending on the name."""
    return {path: _render(path, content).encode() for path, content in sorted(files.items())}


def _render(path: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if path.endswith(".json"):
        return json.dumps(content, indent=2) + "\n"
    return as_yaml(content)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes a text of several lines as a block."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def as_yaml(content: Any) -> str:
    # Through JSON, so that shared objects are written out and not as references.
    content = json.loads(json.dumps(content))
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=100))


def write(files: Mapping[str, bytes], out: Path, *, force: bool) -> None:
    """Write into a folder that is empty or contains the same files; never delete anything."""
    try:
        if not force:
            _refuse_others(files, out)
        for name, content in files.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise OutputError(
            f"cannot write {error.filename}: {error.strerror}",
            hint="name another folder with --out",
        ) from None


def _refuse_others(files: Mapping[str, bytes], out: Path) -> None:
    hint = "name an empty folder with --out, or use --force to write to it anyway"
    for path in out.rglob("*"):
        name = path.relative_to(out).as_posix()
        if path.is_dir() or name == KEYS_FILE or _TOOLS.search(name):
            continue
        if name not in files:
            raise OutputError(f"{out} has {name}, which is not part of this deployment", hint=hint)
        if path.read_bytes() != files[name]:
            raise OutputError(f"{path} was changed, or written with other options", hint=hint)
