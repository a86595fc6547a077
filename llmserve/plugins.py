"""Discovery: which plugins there are, and why one of them does not take part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType

from llmserve import __version__
from llmserve.api import API
from llmserve.installed import EntryPoint, entry_points, normal

GROUP = "llmserve"
NUMBERED = f"{GROUP}.api"
"""A group for plugins of one number of the API: ``llmserve.api1``."""
ONLY = "LLMSERVE_PLUGINS"
BLOCKED = "LLMSERVE_BLOCK_PLUGINS"
_LONGEST = 300


@dataclass(frozen=True)
class Plugin:
    """A plugin as it was found: ``problem`` says why it cannot be used, if it cannot.

    ``api`` is the number of the API that it says it is made for, None where it says nothing.
    """

    name: str
    origin: str
    version: str
    problem: str | None = None
    module: ModuleType | None = None
    entry_point: str = ""
    api: int | None = None
    metadata: str = ""

    def __str__(self) -> str:
        return f"{self.name!r} ({self.origin} {self.version})"

    @property
    def selector(self) -> str:
        """What names this plugin and no other, for the two variables of the environment."""
        return f"{self.origin}:{self.name}"

    @property
    def path(self) -> str:
        """Where its code lies, or its metadata if it was not imported."""
        return getattr(self.module, "__file__", None) or self.metadata


def find_plugins(environment: Mapping[str, str] = os.environ) -> Iterator[Plugin]:
    """Find the core's own plugin and every installed one.

    ``LLMSERVE_PLUGINS`` names the only ones that are loaded, ``LLMSERVE_BLOCK_PLUGINS`` those
    that are not; both take names, or ``distribution:name``, with commas between. A plugin that
    is left out or is made for another API is not imported.
    """
    from llmserve import builtin

    yield Plugin(
        "core", "llmserve", __version__, module=builtin, entry_point=builtin.__name__, api=API
    )
    only, blocked = _names(environment.get(ONLY)), _names(environment.get(BLOCKED))
    for point in _one_of_each(entry_points(GROUP, below=True)):
        found = _found(point)
        if only and not _spellings(found) & only:
            yield replace(found, problem=f"it is not in {ONLY}")
        elif _spellings(found) & blocked:
            yield replace(found, problem=f"{BLOCKED} names it")
        elif problem := _made_for_another(point, found):
            yield replace(found, problem=problem)
        else:
            yield _imported(found)


def unmatched(plugins: Iterable[Plugin], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Say which names in the environment belong to no plugin: a slip there goes unnoticed."""
    known = frozenset[str]().union(*(_spellings(plugin) for plugin in plugins))
    return [
        f"{variable} names {name!r}, and no installed plugin is called that"
        for variable in (ONLY, BLOCKED)
        for name in sorted(_names(environment.get(variable)) - known)
    ]


def reason(error: BaseException) -> str:
    """Say in one line what went wrong in somebody's code."""
    told = " ".join(str(error).split())[:_LONGEST]
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


def _found(point: EntryPoint) -> Plugin:
    return Plugin(
        point.name,
        point.distribution,
        point.version,
        entry_point=point.value,
        api=_number(point),
        metadata=point.folder,
    )


def _one_of_each(points: Iterable[EntryPoint]) -> list[EntryPoint]:
    """Of what a distribution offers under a name for several APIs, keep what fits best."""
    best: dict[tuple[str, str], EntryPoint] = {}
    for point in points:
        key = (normal(point.distribution), point.name)
        if key not in best or _fit(point) > _fit(best[key]):
            best[key] = point
    return list(best.values())


def _fit(point: EntryPoint) -> tuple[bool, bool]:
    return _number(point) == API, not point.group.startswith(NUMBERED)


def _number(point: EntryPoint) -> int | None:
    number = point.group.removeprefix(NUMBERED)
    return int(number) if number.isdecimal() else None


def _made_for_another(point: EntryPoint, found: Plugin) -> str | None:
    """Say why a plugin cannot fit this llmserve; one that says nothing is taken at its word."""
    if point.group in ("", GROUP) or found.api == API:
        return None
    if found.api is None:
        return f"its entry point is in the group {point.group}: name it {NUMBERED}{API} or {GROUP}"
    mend = f"install an {found.origin} for API {API}"
    if found.api > API:
        mend = f"upgrade llmserve, or {mend}"
    return (
        f"it is made for API {found.api} of llmserve, and llmserve {__version__} has {API}: {mend}"
    )


def _imported(found: Plugin) -> Plugin:
    module_name, colon, _ = found.entry_point.partition(":")
    if colon:
        problem = f"its entry point names an attribute ({found.entry_point})"
        return replace(found, problem=f"{problem}: name the module, {module_name}")
    try:
        return replace(found, module=import_module(found.entry_point))
    except (Exception, SystemExit) as error:
        # Whatever a stranger's module does when it is imported, it stops only that plugin.
        return replace(found, problem=reason(error))


def _spellings(plugin: Plugin) -> frozenset[str]:
    return frozenset({plugin.name, f"{normal(plugin.origin)}:{plugin.name}"})


def _names(text: str | None) -> frozenset[str]:
    names = (name.strip() for name in (text or "").split(","))
    return frozenset(_spelt(name) for name in names if name)


def _spelt(name: str) -> str:
    distribution, colon, plugin = name.rpartition(":")
    return f"{normal(distribution.strip())}:{plugin.strip()}" if colon else name
