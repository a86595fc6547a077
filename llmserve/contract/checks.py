"""A check of ``llmserve certify``: one promise of a server, and what it means to a user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["critical", "major", "minor"]
Need = Literal["reference", "chat", "stream"]
Task = Literal["generate", "values"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise; ``run`` gets an examination of a server, and raises where it does not hold.

    The package ``llmserve-certify`` has the examination, and what ``run`` may raise
    (``llmserve_certify.examine``). ``promise`` says what holds, ``meaning`` what it means to a user
    that it does not. ``needs`` is what the check cannot do without. ``follows`` names checks whose
    failure explains one of this check. ``quick`` tells whether it is part of ``--quick``. ``task``
    is what it is about: models that generate text, or those that answer with values, such as
    embeddings.
    """

    name: str
    severity: Severity
    promise: str
    meaning: str
    run: Callable[[Any], None]
    needs: tuple[Need, ...] = ()
    follows: tuple[str, ...] = ()
    quick: bool = True
    task: Task = "generate"
