"""What plugins may rely on: which modules are public, and the number of this state of them.

``API`` is raised when something that was public goes or changes, so that a plugin made for
another number is refused in one line instead of failing somewhere inside. What is only added
does not raise it. A plugin says what it is made for by the group of its entry point, which is
read before anything of it is imported::

    [project.entry-points."llmserve.api2"]
    acme = "acme_llmserve"

In the group ``llmserve`` a plugin says nothing, and counts as made for the current number.

``api.txt`` beside this file has every public name, a line each.
"""

from __future__ import annotations

from llmserve.version import __version__

API = 2
"""The number of the API that this llmserve has."""

MODULES = (
    "llmserve",
    "llmserve.client",
    "llmserve.errors",
    "llmserve.plugin",
    "llmserve.runtime",
    "llmserve.runtime.contract",
    "llmserve.server",
    "llmserve.testing",
)
"""The public modules: every name in ``__all__`` is, or without that, every one that is imported
under its own name, or made there."""

GROUP = "llmserve"
"""The group of entry points in which plugins are looked for."""

CURRENT = f"{GROUP}.api{API}"
"""The group of those that are made for the current number."""


def number_in(group: str) -> int | None:
    """Return the number of the API that plugins in a group of entry points are made for."""
    number = group.removeprefix(f"{GROUP}.api")
    return int(number) if number.isdecimal() else None


def entry_point_problem(group: str, entry_point: str, distribution: str) -> str | None:
    """Say why an entry point cannot be loaded, if it cannot."""
    number = number_in(group)
    if number is not None and number != API:
        mend = f"install a version of {distribution} for API {API}"
        mend = f"upgrade llmserve, or {mend}" if number > API else mend
        has = f"of llmserve, and llmserve {__version__} has {API}"
        return f"it is made for API {number} {has}: {mend}"
    if group not in (GROUP, CURRENT):
        return f"its entry point is in the group {group}: name it {CURRENT} or {GROUP}"
    module, colon, _ = entry_point.partition(":")
    if colon:
        return f"its entry point names an attribute ({entry_point}): name the module, {module}"
    return None
