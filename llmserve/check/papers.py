"""What a model's manifest promises: its files, its parts and the packages they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llmserve.check.needs import check_needs
from llmserve.check.problem import Problem
from llmserve.errors import ConfigError
from llmserve.manifest import Manifest, parts_of
from llmserve.roles import ROLES

# A recipe is what chose the components, not one of them.
_ROLES = ROLES.keys() - {"recipe"}


def check_papers(folder: Path) -> Iterator[Problem]:
    """Check the files of a model that llmserve built, and what is installed here for it."""
    try:
        manifest = Manifest.read(folder)
    except ConfigError as error:
        yield Problem(folder.name, error.problem, error.mend or "build it again")
        return
    if manifest is None:
        return
    for difference in manifest.differences(folder):
        missing = difference.endswith("is missing")
        mend = "build it again" if missing else "build it again, if that was not meant"
        yield Problem(folder.name, difference, mend, fatal=missing)
    yield from check_needs(folder, manifest)
    yield from _check_components(folder, manifest)


def _check_components(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    if manifest.name != folder.name:
        yield Problem(
            folder.name,
            f"its manifest is that of {manifest.name!r}",
            f"call the folder {manifest.name} again, or build it as {folder.name}",
            fatal=False,
        )
    if not manifest.part_of:
        for role in sorted(_ROLES - manifest.components.keys()):
            yield Problem(folder.name, f"its manifest names no {role}", "build it again")
    for part in manifest.parts:
        if not (folder.parent / part).is_dir():
            yield Problem(folder.name, f"its part {part} is missing", "build it again")
    if manifest.part_of and folder.name not in parts_of(folder.parent, manifest.part_of):
        yield Problem(
            folder.name,
            f"it is a part of {manifest.part_of}, which is not here or no longer needs it",
            "build that again, or move the folder out",
            fatal=False,
        )
    for role, component in manifest.components.items():
        path = component["settings"].get("path", "")
        if path.startswith("/") and not Path(path).is_dir():
            yield Problem(
                folder.name,
                f"its {role} is kept at {path}, and nothing is there",
                "put it back, or build with --set weights=copy",
            )
