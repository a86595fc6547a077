"""The registry of installed plugins and their components, by role and name.

Our own plugins have no privileges over third-party ones. A broken plugin causes an error only
when it is selected; so does a name that two plugins register, and the error names both.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from llmserve.errors import MissingPluginError, PluginError, reason
from llmserve.hardware import has_gpu, kind_of
from llmserve.names import near, normal
from llmserve.plugins import hookspecs
from llmserve.plugins.api import API, CURRENT, GROUP, entry_point_problem, number_in
from llmserve.plugins.roles import ROLES, Recipe, Role
from llmserve.problems import Problem
from llmserve.version import __version__

ONLY, BLOCKED = "LLMSERVE_PLUGINS", "LLMSERVE_BLOCK_PLUGINS"
"""Which plugins to load or to leave out: names, or ``distribution:name``, separated by commas."""
R = TypeVar("R", bound=Role)


@dataclass(frozen=True)
class Plugin:
    """An installed plugin; ``problem`` is the reason why it cannot be used, if there is one.

    ``api`` is the API version that it is made for, or None if it declares none.
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
        """The unambiguous name of this plugin in the two environment variables."""
        return f"{self.origin}:{self.name}"

    def is_among(self, names: set[str]) -> bool:
        return not names.isdisjoint({normal(self.name), normal(self.selector)})


@dataclass(frozen=True)
class Entry:
    component: Role
    role: str
    plugin: Plugin


def find_plugins(environment: Mapping[str, str] = os.environ) -> Iterator[Plugin]:
    """Yield the core's own plugin and every installed one, without importing any."""
    yield Plugin("core", "llmserve", __version__, entry_point="llmserve.plugins.builtin", api=API)
    only, blocked = names_in(environment, ONLY), names_in(environment, BLOCKED)
    for plugin in sorted(_installed(), key=lambda plugin: (plugin.name, plugin.origin)):
        if only and not plugin.is_among(only):
            yield replace(plugin, problem=f"it is not in {ONLY}")
        elif plugin.is_among(blocked):
            yield replace(plugin, problem=f"{BLOCKED} names it")
        else:
            yield plugin


def names_in(environment: Mapping[str, str], variable: str) -> set[str]:
    return {normal(name.strip()) for name in environment.get(variable, "").split(",")} - {""}


def _installed() -> Iterator[Plugin]:
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            points = [p for p in distribution.entry_points if p.group.split(".")[0] == GROUP]
            if not points:
                # Its other metadata is not read: that of all packages takes a tenth of a second.
                continue
            key, version = normal(distribution.name), distribution.version or ""
        except Exception:  # noqa: S112 - damaged metadata must not hide other plugins
            continue
        # The first distribution of a name on the path wins, as for imports; of its entry points of
        # one name for several API versions, the best match wins.
        if key not in seen:
            seen.add(key)
            points.sort(key=lambda point: (point.group == CURRENT, point.group == GROUP))
            for name, point in {point.name: point for point in points}.items():
                problem = entry_point_problem(point.group, point.value, distribution.name)
                if not version:
                    problem = "its metadata has no version: install it again"
                origin, folder = distribution.name, str(distribution.locate_file(""))
                api = number_in(point.group)
                yield Plugin(name, origin, version, problem, None, point.value, api, folder)


class Registry:
    """All plugins and their components; without ``components``, only their commands."""

    def __init__(self, plugins: Iterable[Plugin], *, components: bool = True) -> None:
        self._components = components
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.entries: list[Entry] = []
        self.plugins = tuple(self._register(plugin) for plugin in plugins)

    @classmethod
    def load(cls, *, components: bool = True) -> Registry:
        return cls(find_plugins(), components=components)

    @staticmethod
    def unmatched_names(environment: Mapping[str, str]) -> list[str]:
        """Report names in the environment that match no plugin: a typo would go unnoticed."""
        plugins = list(find_plugins({}))
        return [
            f"{variable} names {name!r}, but no installed plugin has that name"
            for variable in (ONLY, BLOCKED)
            for name in sorted(names_in(environment, variable))
            if not any(plugin.is_among({name}) for plugin in plugins)
        ]

    def recipe(self, name: str) -> Recipe:
        return self.get(Recipe, name)

    def recipe_for(self, device: str) -> tuple[Recipe, str]:
        """Return the default recipe and the reason; ``auto`` is this machine's device."""
        suited, kind = self.recipes_for(device)
        others = "".join(f", before {recipe.name}" for recipe in suited[1:])
        return suited[0], f"first choice for {kind}{others}"

    def recipes_for(self, device: str) -> tuple[list[Recipe], str]:
        """Return the recipes for a device, the best one first, and the kind of the device."""
        kind = kind_of(device)
        if kind not in ("cpu", "cuda"):
            kind = "cuda" if has_gpu() else "cpu"
        suited = sorted(
            (recipe for recipe in self.all(Recipe) if kind in recipe.suits),
            key=lambda recipe: (-recipe.suits[kind], recipe.name),
        )
        if not suited:
            raise PluginError(f"no installed plugin suits {kind}", hint="name one with --plugin")
        return suited, kind

    def all(self, kind: type[R]) -> list[R]:
        """Return every component of a role, in order of discovery."""
        return [e.component for e in self.entries if isinstance(e.component, kind)]

    def plugin_of(self, component: Role) -> Plugin:
        return next(entry.plugin for entry in self.entries if entry.component is component)

    def get(self, kind: type[R], name: str) -> R:
        """Return a component, or raise an error that suggests names or names the broken plugin."""
        same = [e for e in self.entries if type(e.component) is kind and e.component.name == name]
        if len(same) > 1:
            hint = f"uninstall one, or set {BLOCKED}={same[-1].plugin.selector}"
            raise PluginError(_clash(same), hint=hint)
        if same and isinstance(component := same[0].component, kind):
            return component
        for plugin in self.plugins:
            if plugin.problem and plugin.name == name:
                raise PluginError(f"plugin {plugin} cannot be used: {plugin.problem}")
        names = {component.name for component in self.all(kind)}
        role = next(role for role, role_type in ROLES.items() if role_type is kind)
        label = "plugin" if kind is Recipe else role.replace("_", " ")
        install = "install the package that has it"
        hint = near(name, names) if names else install
        if hint.startswith("choose"):
            hint += f", or {install}"
        raise MissingPluginError(f"no {label} is called {name!r}", hint=hint, name=name)

    def problems(self) -> list[Problem]:
        """Return the problems with the installed plugins."""
        broken = [f"plugin {p} cannot be used: {p.problem}" for p in self.plugins if p.problem]
        by_name: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        for entry in self.entries:
            by_name[entry.role, entry.component.name].append(entry)
        clashes = [_clash(same) for same in by_name.values() if len(same) > 1]
        return [Problem("", line, code="plugin") for line in (*broken, *clashes)]

    def implementations(self, hook: str) -> Iterator[tuple[Plugin, Any]]:
        """Yield the plugins that implement a hook, each with its function."""
        by_name = {str(plugin): plugin for plugin in self.plugins if plugin.module}
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            yield by_name[implementation.plugin_name], implementation.function

    def _register(self, plugin: Plugin) -> Plugin:
        """Import and register a plugin completely or not at all."""
        if plugin.problem:
            return plugin
        # Not the entry point's name, which two distributions may share.
        name = str(plugin)
        try:
            module = plugin.module or import_module(plugin.entry_point)
            if owner := self._manager.get_name(module):
                raise PluginError(f"plugin {owner} already registered the same module")
            _refuse_misspelt(module)
            self._manager.register(module, name)
            if self._components:
                self.entries += list(_entries(replace(plugin, module=module)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # Whatever a third-party module does, only its own plugin becomes unusable.
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            return replace(plugin, problem=reason(error), module=None)
        return replace(plugin, module=module)


def _entries(plugin: Plugin) -> Iterator[Entry]:
    for role, kind in ROLES.items():
        hook = f"llmserve_register_{role}s"
        try:
            components = list(getattr(plugin.module, hook, list)())
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise PluginError(f"{hook} failed: {reason(error)}") from None
        for component in components:
            if type(component) is not kind:
                types = f"{type(component).__name__}, not {kind.__name__}"
                raise PluginError(f"{hook} returned a list of {types}")
            yield Entry(component, role, plugin)


def _clash(same: list[Entry]) -> str:
    owners = " and by ".join(str(entry.plugin) for entry in same)
    return f"{same[0].role} {same[0].component.name!r} is registered by {owners}"


def _refuse_misspelt(module: ModuleType) -> None:
    """Refuse an unknown or unmarked hook, which pluggy would never call."""
    hooks = [name for name in dir(hookspecs) if name.startswith("llmserve_")]
    for name, value in vars(module).items():
        if name.startswith("llmserve_") and callable(value):
            if name not in hooks:
                raise PluginError(f"there is no hook {name}", hint=near(name, hooks))
            if not hasattr(value, f"{hookspecs.PROJECT}_impl"):
                raise PluginError(f"{name} is not marked", hint="put @llmserve.hookimpl above it")
