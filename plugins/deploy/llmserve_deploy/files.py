"""Files as they are written: the same bytes for the same content, and nothing of anybody else's."""

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
"""What git, Python and file managers leave beside what one runs or keeps."""


def rendered(files: Mapping[str, Any]) -> dict[str, bytes]:
    """Return files by their path: text as it is, data as YAML or JSON, as the name says."""
    return {path: _render(path, content).encode() for path, content in sorted(files.items())}


def _render(path: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if path.endswith(".json"):
        return json.dumps(content, indent=2) + "\n"
    return as_yaml(content)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes a text of several lines as such."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def as_yaml(content: Any) -> str:
    # By way of JSON, so that what is used twice is written twice and not as a reference.
    content = json.loads(json.dumps(content))
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=100))


def write(files: Mapping[str, bytes], out: Path, *, force: bool) -> None:
    """Write into a folder that is empty or holds the same files; nothing is ever deleted."""
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
            mend="name another folder with --out",
        ) from None


def _refuse_others(files: Mapping[str, bytes], out: Path) -> None:
    mend = "name an empty folder with --out, or say --force to write beside and over it"
    for path in out.rglob("*"):
        name = path.relative_to(out).as_posix()
        if path.is_dir() or name == KEYS_FILE or _TOOLS.search(name):
            continue
        if name not in files:
            raise OutputError(f"{out} holds {name}, which is not of this deployment", mend=mend)
        if path.read_bytes() != files[name]:
            raise OutputError(f"{path} was changed, or written with other options", mend=mend)
