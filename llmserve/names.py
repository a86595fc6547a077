"""Validation of names, and suggestions for misspelt ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llmserve.errors import UsageError

# Valid as a model folder for Triton, as a shell word and as a URL path segment.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

_GGUF = ".gguf"


def near(name: str, candidates: Iterable[str]) -> str:
    """Suggest the closest candidates, or list all of them if none is close.

    >>> near("itertive", ["hf", "iterative"])
    "did you mean 'iterative'?"
    >>> near("x", ["hf", "iterative"])
    'choose one of hf, iterative'
    """
    import difflib

    names = sorted(candidates)
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(match) for match in close) + "?"
    return f"choose one of {', '.join(names)}" if names else "none is available"


def normal(distribution: str) -> str:
    """Normalize a distribution's name for comparison."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def is_model_name(name: str) -> bool:
    """Return whether a name is safe in Triton, a shell and a URL, and is not a path."""
    return bool(_MODEL_NAME.fullmatch(name))


def check_model_name(name: str) -> str:
    """Refuse a name that is not safe in Triton, a shell and a URL."""
    if not is_model_name(name):
        raise UsageError(
            f"{name!r} cannot be a model's name",
            hint="use at most 128 letters, digits, '.', '_' and '-', beginning with a letter or "
            "digit (--name)",
        )
    return name


def model_name_from(source: str) -> str:
    """Derive a model's name from the value of ``--model``."""
    basename = source.rstrip("/").rsplit("/", 1)[-1]
    if basename.lower().endswith(_GGUF):
        # On the hub, the file's name follows the model's id and a colon.
        basename = basename[: -len(_GGUF)].rsplit(":", 1)[-1]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", basename).strip("-.") or "model"
