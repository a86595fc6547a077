"""Files of a source, read whole and bounded; none is run, and no link leads out of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import ConfigError

MOST_BYTES = 256 * 1024
"""The most of a file: those that people write are far smaller."""
MOST_FILES = 2000


@dataclass(frozen=True)
class SourceText:
    """A text, the name it is called by, and the folder that its relative paths are from."""

    name: str
    text: str
    folder: Path

    def line_of(self, needle: str, start: int = 1) -> int:
        """Return the line that has a text, from a line on; the first one if none has."""
        lines = self.text.splitlines()
        return next(
            (at for at, line in enumerate(lines[start - 1 :], start) if needle in line), start
        )


def read_source(path: Path, name: str = "") -> SourceText:
    """Read a file; refuse one that is too large, or no text."""
    name = name or str(path)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name} cannot be read: {words}") from None
    if len(content) > MOST_BYTES:
        raise ConfigError(
            f"{name} is over {MOST_BYTES // 1024} KB", hint="name the file that starts the server"
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8 text", hint="save it as UTF-8") from None
    return SourceText(name, text, path.absolute().parent)


def read_json(source: SourceText) -> Any:
    """Parse a text as JSON; raise if it is none, or nested too deeply."""
    try:
        return json.loads(source.text)
    except ValueError as error:
        raise ConfigError(f"{source.name} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source.name} is nested too deeply") from None


def exists(folder: Path, text: str) -> bool:
    """Return whether a text, whatever is in it, is the path of something."""
    try:
        return bool(text) and (folder / text).exists()
    except (OSError, ValueError):
        return False


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path, with all links followed, is in a folder."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):
        return False


def files_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the files of a folder and of those in it, up to a depth; links are not followed."""
    pending, seen = [(folder, depth)], 0
    while pending:
        here, left = pending.pop()
        try:
            entries = sorted(here.iterdir())
        except OSError:
            continue
        for entry in entries:
            seen += 1
            if seen > MOST_FILES:
                return
            if entry.is_symlink():
                continue
            if entry.is_file():
                yield entry
            elif left and entry.is_dir():
                pending.append((entry, left - 1))
