"""Validation of names, and suggestions for misspelt ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llmserve.errors import UsageError

# Valid as a model folder for Triton, as a shell word and as a URL path segment.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

_GGUF = ".gguf"
_FEW = 12
"""How many names an error lists at most."""
_LIKENESS = 0.65
"""Below it, words share letters by chance, as ``max_model_len`` and ``max_tokens`` do."""


def near(name: str, candidates: Iterable[str], *, place: str = "", few: int = _FEW) -> str:
    """Suggest the closest candidates; if none is close, list a few, or say in which place more are.

    >>> near("itertive", ["hf", "iterative"])
    "did you mean 'iterative'?"
    >>> near("x", ["hf", "iterative", "hf"])
    'choose one of hf, iterative'
    >>> near("--x", [f"--y{number}" for number in range(20)], place="llmserve serve --help")
    'see llmserve serve --help'
    """
    names = sorted({*candidates})
    if close := closest(name, names):
        return "did you mean " + " or ".join(repr(match) for match in close) + "?"
    if place and (len(names) > few or not names):
        return f"see {place}"
    others = f" and {len(names) - _FEW} others" if len(names) > _FEW else ""
    return f"choose one of {', '.join(names[:_FEW])}{others}" if names else "none is available"


def closest(name: str, candidates: Iterable[str]) -> list[str]:
    """Return the two closest candidates that a name may be misspelt from.

    >>> closest("--runtme", ["--runtime", "--name"]), closest("--max-model-len", ["--max-tokens"])
    (['--runtime'], [])
    """
    import difflib

    # What options begin with is no likeness.
    plain = {candidate.lstrip("-"): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lstrip("-"), plain, n=2, cutoff=_LIKENESS)
    return [plain[match] for match in found]


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
