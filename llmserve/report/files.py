"""Writing a report: each file all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmserve.errors import ConfigError


def write_all(folder: Path, content: Mapping[str, str]) -> list[Path]:
    """Write files by their names and give their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            draft = folder / f".{name}.part"
            draft.write_text(text, encoding="utf-8", newline="\n")
            draft.replace(folder / name)
    except OSError as error:
        raise ConfigError(
            f"cannot write the report to {folder}: {error.strerror or error}",
            mend="name another folder",
        ) from None
    return [folder / name for name in content]
