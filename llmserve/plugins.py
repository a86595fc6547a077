"""Discovery: entry points → a registry of components by role and name.

Our own plugins come this way too and have no privilege. A plugin that fails to import is
kept as broken and stops only who selects it; a name that two plugins register stops whoever
selects that name, and both are told.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from llmserve import __version__, hookspecs
from llmserve.errors import PluginError
from llmserve.naming import near
from llmserve.roles import ROLES, Batching, Component, Formatter, Generator, Recipe, Tokenizer

GROUP = "llmserve"
ONLY = "LLMSERVE_PLUGINS"
BLOCKED = "LLMSERVE_BLOCK_PLUGINS"

C = TypeVar("C", bound="Component | Recipe")


@dataclass(frozen=True)
class Plugin:
    """A plugin as it was found: ``problem`` says why it does not take part, if it does not."""

    name: str
    origin: str
    version: str
    problem: str | None = None
    module: ModuleType | None = None

    @property
    def where(self) -> str:
        """Its name and the distribution it came in."""
        return f"{self.name!r} ({self.origin} {self.version})"


@dataclass(frozen=True)
class Entry:
    """A component and the plugin that registered it."""

    component: Component | Recipe
    role: str
    plugin: Plugin


class Registry:
    """All plugins and what they registered.

    >>> registry = Registry.load()
    >>> registry.recipe("hf").tokenizer
    'transformers'
    """

    def __init__(self, plugins: Iterable[Plugin], manager: pluggy.PluginManager) -> None:
        self.manager = manager
        checked: list[Plugin] = []
        self.entries: list[Entry] = []
        for plugin in plugins:
            if plugin.module is None:
                checked.append(plugin)
                continue
            try:
                manager.register(plugin.module, plugin.name)
                _refuse_misspelt(plugin.module)
                self.entries += list(_components(plugin))
            except Exception as error:
                manager.set_blocked(plugin.name)
                problem = _reason(error)
                checked.append(Plugin(plugin.name, plugin.origin, plugin.version, problem))
            else:
                checked.append(plugin)
        self.plugins = tuple(checked)

    @classmethod
    def load(cls, environment: Mapping[str, str] = os.environ) -> Registry:
        """Find every installed plugin, but for those that the environment leaves out."""
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        only, blocked = _names(environment.get(ONLY)), _names(environment.get(BLOCKED))
        found = [_builtin()]
        for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
            if only and point.name not in only:
                found.append(_described(point, problem=f"blocked: not in {ONLY}"))
            elif point.name in blocked:
                found.append(_described(point, problem=f"blocked by {BLOCKED}"))
            else:
                found.append(_imported(point))
        return cls(found, manager)

    def tokenizer(self, name: str) -> Tokenizer:
        """Return the tokenizer of that name."""
        return self.get(Tokenizer, name)

    def generator(self, name: str) -> Generator:
        """Return the generator of that name."""
        return self.get(Generator, name)

    def batching(self, name: str) -> Batching:
        """Return the batching strategy of that name."""
        return self.get(Batching, name)

    def formatter(self, name: str) -> Formatter:
        """Return the formatter of that name."""
        return self.get(Formatter, name)

    def recipe(self, name: str) -> Recipe:
        """Return the recipe that ``--plugin`` names."""
        return self.get(Recipe, name)

    def all(self, kind: type[C]) -> list[C]:
        """Return every component of a role, in the order of discovery."""
        return [e.component for e in self.entries if isinstance(e.component, kind)]

    def plugin_of(self, component: Component | Recipe) -> Plugin:
        """Return the plugin that registered a component."""
        return next(entry.plugin for entry in self.entries if entry.component is component)

    def get(self, kind: type[C], name: str) -> C:
        """Return a component, or say which name was probably meant and what is broken."""
        matches = [e for e in self.entries if isinstance(e.component, kind)]
        chosen = [e for e in matches if e.component.name == name]
        label = "plugin" if kind is Recipe else _role_of(kind)
        if len(chosen) > 1:
            owners = " and ".join(e.plugin.where for e in chosen)
            raise PluginError(
                f"{label} {name!r} is registered by {owners}",
                mend=f"uninstall one, or name it in {BLOCKED}",
            )
        if chosen and isinstance(component := chosen[0].component, kind):
            return component
        for plugin in self.plugins:
            if plugin.problem and plugin.name == name:
                raise PluginError(f"plugin {plugin.where} cannot be used: {plugin.problem}")
        raise PluginError(
            f"no {label} is called {name!r}", mend=near(name, {e.component.name for e in matches})
        )


def _components(plugin: Plugin) -> Iterable[Entry]:
    for role, kind in ROLES.items():
        hook = getattr(plugin.module, f"llmserve_register_{role}s", None)
        for component in hook() if hook else ():
            if not isinstance(component, kind):
                raise PluginError(
                    f"llmserve_register_{role}s returned {type(component).__name__}, "
                    f"not {kind.__name__}"
                )
            yield Entry(component, role, plugin)


def _refuse_misspelt(module: ModuleType) -> None:
    """A hook that no specification has would otherwise never be called, without a word."""
    known = {name for name in dir(hookspecs) if name.startswith("llmserve_")}
    for name in dir(module):
        if name.startswith("llmserve_") and callable(getattr(module, name)) and name not in known:
            raise PluginError(f"there is no hook {name}", mend=near(name, known))
        if name in known and not hasattr(getattr(module, name), f"{hookspecs.PROJECT}_impl"):
            raise PluginError(f"{name} is not marked", mend="put @llmserve.hookimpl above it")


def _builtin() -> Plugin:
    from llmserve import builtin

    return Plugin("core", "llmserve", __version__, module=builtin)


def _imported(point: EntryPoint) -> Plugin:
    try:
        module: Any = point.load()
    except Exception as error:  # whatever a stranger's module raises, it is theirs alone
        return _described(point, problem=_reason(error))
    return _described(point, module=module)


def _described(
    point: EntryPoint, *, problem: str | None = None, module: ModuleType | None = None
) -> Plugin:
    name, version = (point.dist.name, point.dist.version) if point.dist else ("unknown", "unknown")
    return Plugin(point.name, name, version, problem, module)


def _reason(error: Exception) -> str:
    first = str(error).strip().splitlines()[:1]
    return (
        str(error)
        if isinstance(error, PluginError)
        else f"{type(error).__name__}: {first[0] if first else ''}"
    )


def _names(text: str | None) -> frozenset[str]:
    return frozenset(name.strip() for name in (text or "").split(",") if name.strip())


def _role_of(kind: type[Any]) -> str:
    return next((role for role, known in ROLES.items() if known is kind), "component")
