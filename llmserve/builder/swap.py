"""The moment in which new models take the place of old ones: all of them or none.

A journal in the stage names what is to move. Whoever finds one, the build itself after an
error or the next one after a kill, can move everything back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

MODELS = "models"
"""Within a stage: the models as they were built."""
ASIDE = ".replaced"
"""Within a stage: where the models that are being replaced wait."""
_JOURNAL = ".swap"


def swap(stage: Path, output: Path, fresh: Iterable[str], stale: Iterable[str]) -> None:
    """Move the models ``fresh`` from a stage to the repository, and ``stale`` out of it."""
    fresh = list(fresh)
    aside = stage / ASIDE
    aside.mkdir(exist_ok=True)
    draft = stage / f"{_JOURNAL}.new"
    draft.write_text(json.dumps(fresh), encoding="utf-8")
    draft.replace(stage / _JOURNAL)
    for name in stale:
        (output / name).rename(aside / name)
    for name in fresh:
        (stage / MODELS / name).rename(output / name)


def commit(stage: Path) -> None:
    """From here on nothing is moved back."""
    (stage / _JOURNAL).unlink()


def undo(stage: Path, output: Path) -> None:
    """Move everything back, however far it had come: what has moved is seen in what is there."""
    journal = stage / _JOURNAL
    if not journal.exists():
        return
    for name in json.loads(journal.read_text(encoding="utf-8")):
        staged = stage / MODELS / name
        if not staged.exists() and (output / name).exists():
            (output / name).rename(staged)
    for model in (stage / ASIDE).glob("*"):
        if not (output / model.name).exists():
            model.rename(output / model.name)
    journal.unlink()
