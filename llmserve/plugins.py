"""Discovery: which plugins there are, and why one of them does not take part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from llmserve import __version__
from llmserve.installed import EntryPoint, entry_points

GROUP = "llmserve"
ONLY = "LLMSERVE_PLUGINS"
BLOCKED = "LLMSERVE_BLOCK_PLUGINS"
_LONGEST = 300


@dataclass(frozen=True)
class Plugin:
    """A plugin as it was found: ``problem`` says why it cannot be used, if it cannot."""

    name: str
    origin: str
    version: str
    problem: str | None = None
    module: ModuleType | None = None

    def __str__(self) -> str:
        return f"{self.name!r} ({self.origin} {self.version})"


def find_plugins(environment: Mapping[str, str] = os.environ) -> Iterator[Plugin]:
    """Find the core's own plugin and every installed one.

    ``LLMSERVE_PLUGINS`` names the only ones that are loaded, ``LLMSERVE_BLOCK_PLUGINS`` those
    that are not; both take names with commas between. A plugin that is left out is not imported.
    """
    from llmserve import builtin

    yield Plugin("core", "llmserve", __version__, module=builtin)
    only, blocked = _names(environment.get(ONLY)), _names(environment.get(BLOCKED))
    for point in entry_points(GROUP):
        if only and point.name not in only:
            yield _plugin(point, problem=f"it is not in {ONLY}")
        elif point.name in blocked:
            yield _plugin(point, problem=f"{BLOCKED} names it")
        else:
            yield _imported(point)


def reason(error: BaseException) -> str:
    """Say in one line what went wrong in somebody's code."""
    told = " ".join(str(error).split())[:_LONGEST]
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


def _imported(point: EntryPoint) -> Plugin:
    module_name, colon, _ = point.value.partition(":")
    if colon:
        problem = f"its entry point names an attribute ({point.value})"
        return _plugin(point, problem=f"{problem}: name the module, {module_name}")
    try:
        module = import_module(point.value)
    except (Exception, SystemExit) as error:
        # Whatever a stranger's module does when it is imported, it stops only that plugin.
        return _plugin(point, problem=reason(error))
    return _plugin(point, module=module)


def _plugin(
    point: EntryPoint, *, problem: str | None = None, module: ModuleType | None = None
) -> Plugin:
    return Plugin(point.name, point.distribution, point.version, problem, module)


def _names(text: str | None) -> frozenset[str]:
    return frozenset(name.strip() for name in (text or "").split(",") if name.strip())
