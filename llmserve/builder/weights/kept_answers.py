"""Keeps what comparisons of weights have found, so that each is computed once for a user.

A comparison imports torch and transformers, which takes seconds. What it finds follows from its
question, which has every name and shape, and from the code that answers it. An answer is found by
both, so one that was given by other code is not found.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmserve.builder.home import home, make_private
from llmserve.errors import LLMServeError

_FOLDER = "comparisons"
_KEPT = 500
"""How many answers are kept at most; each takes a block of the disk."""
# transformers loads without values by accelerate's hooks, if it is installed.
_PACKAGES = ("torch", "transformers", "accelerate", "safetensors")


def find_answer(question: str) -> Mapping[str, Any] | None:
    """Return what was found before in answer to the same question, by the same code."""
    with suppress(OSError, ValueError, RecursionError, LLMServeError):
        answer = json.loads(_place(question).read_text(encoding="utf-8"))
        if _is_whole(answer):
            found: Mapping[str, Any] = answer
            return found
    return None


def keep_answer(question: str, answer: Mapping[str, Any]) -> None:
    """Keep an answer, unless it is that something could not be compared: next time it may be."""
    if not _is_whole(answer):
        return
    with suppress(OSError, ValueError, LLMServeError):
        place = _place(question)
        handle, draft = tempfile.mkstemp(dir=place.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(answer, file)
            Path(draft).replace(place)
        finally:
            Path(draft).unlink(missing_ok=True)
        _remove_oldest(place.parent)


def comparing_code() -> Iterator[str]:
    """Yield what tells the code that compares from any other.

    A checkout of transformers changes without its version, so the state of its files counts.
    """
    yield sys.version
    yield Path(__file__).with_name("compare.py").read_text(encoding="utf-8")
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield f"{name}=={metadata.version(name)}"
    spec = find_spec("transformers")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from _modules(folder)


def _is_whole(answer: object) -> bool:
    kinds = {"nan": list, "missing": list, "mismatched": list}
    return isinstance(answer, dict) and {key: type(answer[key]) for key in answer} == kinds


def _place(question: str) -> Path:
    """Return the file of an answer, in a folder that is this user's alone."""
    folder = home()
    make_private(folder, _FOLDER)
    digest = hashlib.sha256()
    for part in (question, *comparing_code()):
        digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    return folder / _FOLDER / f"{digest.hexdigest()}.json"


def _modules(folder: str) -> Iterator[str]:
    """Yield each module of a package with its size and the time of its last change."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                status = entry.stat()
                yield f"{entry.path} {status.st_size} {status.st_mtime_ns}"
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _modules(entry.path)


def _remove_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-_KEPT]:
        file.unlink(missing_ok=True)
