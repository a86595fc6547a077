"""The API that plugins may rely on: its public modules and its version number.

``API`` is raised when a public name is removed or changed, so that a plugin for another version
is refused in one line instead of failing somewhere inside. Additions do not raise it. A plugin
declares its API version with the group of its entry point, which is read before any of its
modules is imported::

    [project.entry-points."llmserve.api3"]
    acme = "acme_llmserve"

A plugin in the group ``llmserve`` declares no version and counts as made for the current one.

``llmserve/api.txt`` lists every public name, one per line.
"""

from __future__ import annotations

from llmserve.version import __version__

API = 3
"""The API version of this llmserve."""

_CHANGES = {
    2: "errors and problems have hint instead of mend, a Problem has where and message instead of "
    "model and what, a Place has tritons instead of replicas and metrics, a Recipe has no pairs, "
    "llmserve.certify is the package llmserve-certify",
}
"""What the author of a plugin for an older version has to change, in one line."""

MODULES = (
    "llmserve",
    "llmserve.client",
    "llmserve.commands",
    "llmserve.contract.container",
    "llmserve.contract.failures",
    "llmserve.errors",
    "llmserve.graphs",
    "llmserve.plugin",
    "llmserve.runtime",
    "llmserve.runtime.causal",
    "llmserve.runtime.contract",
    "llmserve.server",
    "llmserve.testing",
)
"""The public modules. Their public names are those in ``__all__`` or, without it, those that are
defined there."""

GROUP = "llmserve"
"""The entry point group in which plugins are searched for."""

CURRENT = f"{GROUP}.api{API}"
"""The entry point group of plugins made for the current API version."""


def number_in(group: str) -> int | None:
    """Return the API version that plugins in an entry point group are made for."""
    number = group.removeprefix(f"{GROUP}.api")
    return int(number) if number.isdecimal() else None


def entry_point_problem(group: str, entry_point: str, distribution: str) -> str | None:
    """Return why an entry point cannot be loaded, or None."""
    number = number_in(group)
    if number is not None and number != API:
        hint = f"install a version of {distribution} for API {API}"
        hint = f"upgrade llmserve, or {hint}" if number > API else hint
        if number in _CHANGES:
            hint += f", or change it: {_CHANGES[number]}"
        current = f"llmserve {__version__} has {API}"
        return f"it is made for API {number} of llmserve, and {current}: {hint}"
    if group not in (GROUP, CURRENT):
        return f"its entry point is in the group {group}: name it {CURRENT} or {GROUP}"
    module, colon, _ = entry_point.partition(":")
    if colon:
        return f"its entry point names an attribute ({entry_point}): name the module, {module}"
    return None
