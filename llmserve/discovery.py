"""Which plugins are installed, and why one of them does not take part."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from types import ModuleType

from llmserve.api import API
from llmserve.errors import reason
from llmserve.version import __version__

GROUP = "llmserve"
ONLY, BLOCKED = "LLMSERVE_PLUGINS", "LLMSERVE_BLOCK_PLUGINS"


@dataclass(frozen=True)
class Plugin:
    """A plugin as it was found: ``problem`` says why it cannot be used, if it cannot.

    ``api`` is the number of the API that it is made for, None where it does not say.
    """

    name: str
    origin: str
    version: str
    problem: str | None = None
    module: ModuleType | None = None
    entry_point: str = ""
    api: int | None = None
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.name!r} ({self.origin} {self.version})"

    @property
    def selector(self) -> str:
        """What names this plugin and no other, for the two variables of the environment."""
        return f"{self.origin}:{self.name}"

    @property
    def path(self) -> str:
        """The file that was imported, or the folder where its distribution is installed."""
        return getattr(self.module, "__file__", None) or self.folder


def find_plugins(environment: Mapping[str, str] = os.environ) -> Iterator[Plugin]:
    """Find the core's own plugin and every installed one.

    ``LLMSERVE_PLUGINS`` names the only ones to load, ``LLMSERVE_BLOCK_PLUGINS`` those to leave
    out; both take names, or ``distribution:name``, with commas between. A plugin that is left out
    or is made for another API is not imported.
    """
    from llmserve import builtin

    name = builtin.__name__
    yield Plugin("core", "llmserve", __version__, module=builtin, entry_point=name, api=API)
    only, blocked = _names(environment.get(ONLY)), _names(environment.get(BLOCKED))
    for plugin in sorted(_installed(), key=lambda plugin: (plugin.name, plugin.origin)):
        if only and not _spellings(plugin) & only:
            yield replace(plugin, problem=f"it is not in {ONLY}")
        elif _spellings(plugin) & blocked:
            yield replace(plugin, problem=f"{BLOCKED} names it")
        else:
            yield plugin if plugin.problem else _imported(plugin)


def unmatched(plugins: Iterable[Plugin], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Say which names in the environment belong to no plugin: a slip there goes unnoticed."""
    known = frozenset[str]().union(*(_spellings(plugin) for plugin in plugins))
    return [
        f"{variable} names {name!r}, and no installed plugin is called that"
        for variable in (ONLY, BLOCKED)
        for name in sorted(_names(environment.get(variable)) - known)
    ]


def normal(distribution: str) -> str:
    """Return the one spelling of a distribution's name by which names are compared."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def dependencies(distribution: str) -> tuple[str, ...]:
    """Return the names of what a distribution requires, without what only its extras do."""
    required = (text.partition(";") for text in metadata.requires(distribution) or ())
    names = (re.match(r"[\w.-]+", text) for text, _, marker in required if "extra" not in marker)
    return tuple(name[0] for name in names if name)


def _installed() -> Iterator[Plugin]:
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            points = [p for p in distribution.entry_points if f"{p.group}.".startswith(f"{GROUP}.")]
            key = normal(distribution.name) if points else ""
        except Exception:  # noqa: S112 - a stranger's damaged metadata must hide nobody else
            continue
        if not points or key in seen:
            continue
        # The first distribution of a name on the path counts, as it does for imports; of what it
        # offers under one name for several APIs, what fits best.
        seen.add(key)
        points.sort(key=lambda point: (point.group == f"{GROUP}.api{API}", point.group == GROUP))
        yield from {point.name: _plugin(point, distribution) for point in points}.values()


def _plugin(point: metadata.EntryPoint, distribution: metadata.Distribution) -> Plugin:
    number = re.fullmatch(rf"{GROUP}\.api(\d+)", point.group)
    api = int(number[1]) if number else None
    name, problem = distribution.name, None
    if point.group not in (GROUP, f"{GROUP}.api{API}"):
        mend = f"install an {name} for API {API}"
        has = f"of llmserve, and llmserve {__version__} has {API}"
        problem = (
            f"its entry point is in the group {point.group}: name it {GROUP}.api{API} or {GROUP}"
        )
        if api is not None:
            mend = f"upgrade llmserve, or {mend}" if api > API else mend
            problem = f"it is made for API {api} {has}: {mend}"
    folder = str(distribution.locate_file(""))
    return Plugin(point.name, name, distribution.version, problem, None, point.value, api, folder)


def _imported(found: Plugin) -> Plugin:
    module, colon, _ = found.entry_point.partition(":")
    if colon:
        problem = f"its entry point names an attribute ({found.entry_point})"
        return replace(found, problem=f"{problem}: name the module, {module}")
    try:
        return replace(found, module=import_module(module))
    except (Exception, SystemExit) as error:
        # Whatever a stranger's module does when it is imported, it stops only that plugin.
        return replace(found, problem=reason(error))


def _spellings(plugin: Plugin) -> frozenset[str]:
    return frozenset({plugin.name, f"{normal(plugin.origin)}:{plugin.name}"})


def _names(text: str | None) -> frozenset[str]:
    names = (name.strip().rpartition(":") for name in (text or "").split(","))
    return frozenset(f"{normal(of.strip())}{colon}{name.strip()}" for of, colon, name in names) - {
        ""
    }
