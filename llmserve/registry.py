"""The registry: every component by role and name, with the plugin that brought it.

Our own plugins register like anybody's and have no privilege. One that is broken stops only
who selects it; a name that two plugins register stops whoever selects it, and names both.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import pluggy

from llmserve import hookspecs
from llmserve.discovery import BLOCKED, Plugin, find_plugins
from llmserve.errors import PluginError, reason
from llmserve.names import near
from llmserve.roles import ROLES, Backend, Component, Recipe
from llmserve.runtime.contract import TYPES

Registered: TypeAlias = "Component | Recipe | Backend"
C = TypeVar("C", bound=Registered)


@dataclass(frozen=True)
class Entry:
    """A component, its role and the plugin that registered it."""

    component: Registered
    role: str
    plugin: Plugin


class Registry:
    """All plugins and what they registered.

    >>> Registry.load().get(Recipe, "no such recipe")
    Traceback (most recent call last):
    llmserve.errors.PluginError: no plugin is called 'no such recipe': ...
    """

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.entries: list[Entry] = []
        self.plugins = tuple(self._take(plugin) for plugin in plugins)

    @classmethod
    def load(cls) -> Registry:
        """Find every installed plugin, but for those that the environment leaves out."""
        return cls(find_plugins())

    def recipe(self, name: str) -> Recipe:
        """Return the recipe that ``--plugin`` names."""
        return self.get(Recipe, name)

    def all(self, kind: type[C]) -> list[C]:
        """Return every component of a role, in the order of discovery."""
        return [e.component for e in self.entries if isinstance(e.component, kind)]

    def plugin_of(self, component: Registered) -> Plugin:
        """Return the plugin that registered a component."""
        return next(entry.plugin for entry in self.entries if entry.component is component)

    def get(self, kind: type[C], name: str, *, of: Recipe | None = None) -> C:
        """Return a component, or say which name was probably meant and what is broken.

        A part ``of`` a recipe that is not there is nobody's slip of the pen.
        """
        same = [e for e in self.entries if type(e.component) is kind and e.component.name == name]
        if len(same) > 1:
            mend = f"uninstall one, or set {BLOCKED}={same[-1].plugin.selector}"
            raise PluginError(_clash(same), mend=mend)
        if same and isinstance(component := same[0].component, kind):
            return component
        label = "plugin" if kind is Recipe else role_of(kind)
        if of:
            raise PluginError(
                f"recipe {of.name!r} is made with the {label} {name!r}, which no plugin that can "
                "be used brings",
                mend="install the package that does; `llmserve plugins` says what is left out",
            )
        for plugin in self.plugins:
            if plugin.problem and plugin.name == name:
                raise PluginError(f"plugin {plugin} cannot be used: {plugin.problem}")
        names = {c.name for c in self.all(kind)}
        raise PluginError(f"no {label} is called {name!r}", mend=near(name, names))

    def problems(self) -> list[str]:
        """Say what is wrong with the installed plugins, a line each."""
        broken = [f"plugin {p} cannot be used: {p.problem}" for p in self.plugins if p.problem]
        by_name: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        for entry in self.entries:
            by_name[entry.role, entry.component.name].append(entry)
        return broken + [_clash(same) for same in by_name.values() if len(same) > 1]

    def implementations(self, hook: str) -> Iterator[tuple[Plugin, Any]]:
        """Go through the plugins that implement a hook, with the function of each."""
        by_module = {id(plugin.module): plugin for plugin in self.plugins if plugin.module}
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            if plugin := by_module.get(id(implementation.plugin)):
                yield plugin, implementation.function

    def _take(self, plugin: Plugin) -> Plugin:
        """Register a plugin, all of it or nothing."""
        if plugin.module is None:
            return plugin
        if owner := self._manager.get_name(plugin.module):
            return replace(plugin, problem=f"plugin {owner} has brought its module", module=None)
        try:
            _refuse_misspelt(plugin.module)
            # Under no name of its own: two distributions may name their entry points alike.
            self._manager.register(plugin.module, str(plugin))
            self._manager.check_pending()
            self.entries += list(self._components(plugin))
        except (Exception, SystemExit) as error:
            if self._manager.is_registered(plugin.module):
                self._manager.unregister(plugin.module)
            return replace(plugin, problem=reason(error), module=None)
        return plugin

    def _components(self, plugin: Plugin) -> Iterator[Entry]:
        for role, kind in ROLES.items():
            hook = f"llmserve_register_{role}s"
            for implementation in getattr(self._manager.hook, hook).get_hookimpls():
                if implementation.plugin is not plugin.module:
                    continue
                for component in implementation.function():
                    if type(component) is not kind:
                        kinds = f"a {type(component).__name__}, not a {kind.__name__}"
                        raise PluginError(f"{hook} returned {kinds}")
                    _refuse_unusable(role, component)
                    yield Entry(component, role, plugin)


def role_of(kind: type[Any]) -> str:
    """Return the role that a class of components fills."""
    return next(role for role, known in ROLES.items() if known is kind)


def _clash(same: list[Entry]) -> str:
    owners = " and by ".join(str(entry.plugin) for entry in same)
    return f"{same[0].role} {same[0].component.name!r} is registered by {owners}"


def _refuse_unusable(role: str, component: Any) -> None:
    """Refuse what would be found out only by a build, or by Triton."""
    for name in getattr(component, "requires", None) or ():
        # It is looked up by name: a range would be found nowhere.
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
            raise PluginError(
                f"{role} {component.name!r} requires {name!r}, which is no distribution's name",
                mend="ranges and extras belong into the dependencies of its pyproject.toml",
            )
    for tensor in (*getattr(component, "inputs", ()), *getattr(component, "outputs", ())):
        if tensor.data_type not in TYPES:
            raise PluginError(
                f"{role} {component.name!r} declares {tensor.name} with the type "
                f"{tensor.data_type!r}",
                mend=near(f"TYPE_{tensor.data_type.removeprefix('TYPE_')}", TYPES),
            )


def _refuse_misspelt(module: Any) -> None:
    """Refuse a hook that no specification has, or without its mark: it would never be called."""
    known = [name for name in dir(hookspecs) if name.startswith("llmserve_")]
    for name, value in vars(module).items():
        if name.startswith("llmserve_") and callable(value):
            if name not in known:
                raise PluginError(f"there is no hook {name}", mend=near(name, known))
            if not hasattr(value, f"{hookspecs.PROJECT}_impl"):
                raise PluginError(f"{name} is not marked", mend="put @llmserve.hookimpl above it")
