"""Names: which are allowed, and which one was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llmserve.errors import UsageError

# What Triton takes as a model's folder, a shell as a word and a URL as a path segment.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def near(name: str, known: Iterable[str]) -> str:
    """Say what was probably meant, else all there is.

    >>> near("itertive", ["hf", "iterative"])
    "did you mean 'iterative'?"
    >>> near("x", ["hf", "iterative"])
    'choose one of hf, iterative'
    """
    import difflib

    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(match) for match in close) + "?"
    return f"choose one of {', '.join(names)}" if names else "there is none"


def normal(distribution: str) -> str:
    """Return the one spelling of a distribution's name by which names are compared."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def is_model_name(name: str) -> bool:
    """Tell whether Triton, a shell and a URL take a name for a model's, and no path for one."""
    return bool(_MODEL_NAME.fullmatch(name))


def check_model_name(name: str) -> str:
    """Refuse a name that Triton, a shell or a URL would stumble over."""
    if not is_model_name(name):
        raise UsageError(
            f"{name!r} cannot be a model's name",
            mend="use at most 128 letters, digits, '.', '_' and '-', beginning with a letter or "
            "digit (--name)",
        )
    return name


def model_name_from(source: str) -> str:
    """Derive a model's name from what ``--model`` said."""
    last = source.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", last).strip("-.") or "model"
