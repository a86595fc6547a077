"""What distributions need, by the metadata of those that are installed here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(
    names: Collection[str],
    *,
    environment: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> set[str]:
    """Return these requirements (``name`` or ``name[extra]``) and all that they need, by name.

    ``environment`` replaces markers of this Python. What ``without`` names is returned, but not
    what it needs.
    """
    found: set[str] = set()
    done: set[str] = set()
    waiting = list(map(str, names))
    while waiting:
        text = waiting.pop()
        if text in done:
            continue
        done.add(text)
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        found.add(name)
        if name not in without:
            waiting += _needs(name, requirement.extras, environment or {})
    return found


def _needs(name: str, extras: Collection[str], environment: Mapping[str, str]) -> Iterator[str]:
    try:
        requires = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        # For another version of Python, such as a backport: these need nothing.
        return
    for text in requires:
        needed = Requirement(text)
        marker = needed.marker
        wanted = [{**environment, "extra": extra} for extra in ("", *extras)]
        if marker is None or any(marker.evaluate(values) for values in wanted):
            yield (
                f"{needed.name}[{','.join(sorted(needed.extras))}]"
                if needed.extras
                else needed.name
            )
