"""From a spec to a plan: components chosen, options checked, what cannot work refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from llmserve.builder.context import BuildContext
from llmserve.errors import (
    TRACEBACK,
    IncompatibleError,
    LLMServeError,
    OptionError,
    PluginError,
    reason,
)
from llmserve.names import check_model_name, model_name_from, normal
from llmserve.options import Option, Value, renamed_values, resolve
from llmserve.registry import Plugin, Registry
from llmserve.repository.manifest import Manifest
from llmserve.roles import Batching, Component, Formatter, Generator, Recipe, Tokenizer
from llmserve.runtime.contract import (
    FORMS,
    MESSAGES,
    SAMPLING,
    TEXT_FORMAT_INPUTS,
    TEXT_INPUT,
    Tensor,
)
from llmserve.runtime.params import READERS

SOURCE_OPTIONS = (
    Option("revision", "", "Branch, tag or commit of a model on the hub."),
    Option(
        "weights",
        "auto",
        "copy puts the model's files into the repository, reference leaves them where they are; "
        "auto copies local folders and leaves the hub's in its cache.",
        choices=("auto", "copy", "reference"),
    ),
    Option("trust_remote_code", False, "Run Python code that comes with the model."),
    Option("pickle", False, "Load pickled weights, which can run code."),
)

REQUEST_OPTIONS = (
    Option("max_tokens", 64, "Longest answer of a request that does not say.", minimum=1),
    Option("stream", False, "Send pieces to a request that does not say."),
    Option("chat", False, "Treat text_input as a user's message in the model's chat template."),
    Option("echo", False, "Begin the answer with the prompt, as Triton's tutorial does."),
)


DEFAULT_OUTPUT = Path("model_repository")


@dataclass(frozen=True)
class BuildSpec:
    """One model to build: a recipe, a model, and what departs from the recipe's defaults."""

    plugin: str
    model: str
    name: str | None = None
    output: Path = DEFAULT_OUTPUT
    tokenizer: str | None = None
    generator: str | None = None
    batching: str | None = None
    formatter: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    force: bool = False

    @property
    def model_name(self) -> str:
        return check_model_name(self.name or model_name_from(self.model))


@dataclass(frozen=True)
class BuildResult:
    """A model that was built: where it lies and what its manifest says."""

    name: str
    repository: Path
    manifest: Manifest
    dockerfile: Path
    docker_build: str
    docker_run: str

    @property
    def folder(self) -> Path:
        return self.repository / self.name


def needed_packages(plan: Plan) -> dict[str, str]:
    """Return the packages of the plan with the versions that are installed here.

    Whatever a component says it requires, the distribution it comes from is among them.
    """
    found = {}
    for name in sorted({normal(name) for name in ("llmserve", *plan.needed)}):
        if not re.fullmatch(r"[\w-]+", name):
            raise PluginError(
                f"--plugin {plan.recipe.name} requires {name!r}, which is no distribution's name",
                mend="ranges and extras belong into the dependencies of its pyproject.toml",
            )
        try:
            # A local build's suffix, such as +cpu, is no version that an index has.
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            raise PluginError(
                f"{name} is needed by --plugin {plan.recipe.name} and not installed",
                mend=f"pip install {name}",
            ) from None
    return found


PARTS: Mapping[str, type[Component]] = {
    "tokenizer": Tokenizer,
    "generator": Generator,
    "batching": Batching,
    "formatter": Formatter,
}
"""The roles that a model is made of, in the order in which a request meets them."""
CONTRACT = frozenset(READERS) | {
    tensor.name for tensor in (TEXT_INPUT, MESSAGES, *SAMPLING, *TEXT_FORMAT_INPUTS)
}
"""The names that every model knows, whether it takes them or not."""

_FORMS = frozenset(tensor.name for tensor in FORMS)


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first file is written."""

    recipe: Recipe
    plugins: Mapping[str, Plugin]
    """Who brought the recipe and every component, by role."""
    needed: frozenset[str]
    """The distributions that the recipe and every chosen component come from and require."""
    tokenizer: Tokenizer
    generator: Generator
    batching: Batching
    formatter: Formatter
    options: Mapping[str, Value]
    notices: Sequence[str] = ()
    """What whoever builds should know of the options that were given."""

    def prepare(self, role: str, context: BuildContext) -> dict[str, Any]:
        """Let a component put its files into a model; return what the runtime makes it from."""
        component: Component = getattr(self, role)
        with self.errors_of(role, "prepare"):
            settings = component.prepare(context) if component.prepare else {}
            if not isinstance(settings, Mapping):
                raise TypeError(f"it returned {settings!r} instead of a mapping")
            json.dumps(dict(settings), allow_nan=False)
        return {"name": component.name, "runtime": component.runtime, "settings": dict(settings)}

    @contextmanager
    def errors_of(self, role: str, function: str) -> Iterator[None]:
        """Name whose code it was that failed, unless it said so itself."""
        try:
            yield
        except LLMServeError:
            raise
        except Exception as error:
            raise PluginError(
                f"{function} of {self.whose(role)} failed: {reason(error)}",
                mend=f"tell its author; {TRACEBACK}=1 shows where",
            ) from error

    def whose(self, role: str) -> str:
        """Say which component fills a role and which plugin it comes from, for an error."""
        return f"{role} {getattr(self, role).name!r} of plugin {self.plugins[role]}"

    def components(self) -> Iterator[tuple[str, Component]]:
        return ((role, getattr(self, role)) for role in PARTS)

    @property
    def extras(self) -> frozenset[str]:
        """The inputs that are nobody's but this generator's and this formatter's."""
        return _own(self.generator) | _own(self.formatter)

    @property
    def inputs(self) -> list[Tensor]:
        """The model's inputs: the text, and what each component reads beside it.

        Where the generator cannot be constrained, the formatter's inputs for that are left out,
        but for those that it declares itself, and requests with them are refused.
        """
        of_generator = {tensor.name for tensor in self.generator.inputs}
        left_out = (_own(self.formatter) | _FORMS) - of_generator
        tensors = {TEXT_INPUT.name: TEXT_INPUT}
        for role, component in self.components():
            for tensor in component.inputs:
                if tensor.name in left_out and not self.generator.constrains:
                    continue
                if tensors.setdefault(tensor.name, tensor) != tensor:
                    raise IncompatibleError(
                        f"{role} {component.name!r} declares {tensor.name} otherwise than "
                        "another component does"
                    )
        # Where messages can take its place, the text need not be sent.
        if MESSAGES.name in tensors:
            tensors[TEXT_INPUT.name] = replace(TEXT_INPUT, optional=True)
        return list(tensors.values())


def _own(component: Component) -> frozenset[str]:
    return frozenset(tensor.name for tensor in component.inputs) - CONTRACT


def suited_recipe(registry: Registry, device: str) -> tuple[Recipe, str]:
    """Return the recipe for who names none, and why; ``auto`` is this machine's device."""
    kind = device.partition(":")[0].replace("balanced", "cuda")
    if kind not in ("cpu", "cuda"):
        kind = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    fit = sorted(
        (recipe for recipe in registry.all(Recipe) if kind in recipe.suits),
        key=lambda recipe: (-recipe.suits[kind], recipe.name),
    )
    if not fit:
        raise PluginError(
            f"no plugin that is installed suits {kind}", mend="name one with --plugin"
        )
    others = "".join(f", before {recipe.name}" for recipe in fit[1:])
    return fit[0], f"first of what is installed for {kind}{others}"


def make_plan(spec: BuildSpec, registry: Registry) -> Plan:
    """Choose the components, resolve every option and refuse what cannot work together."""
    recipe = registry.recipe(spec.plugin)
    chosen = {role: getattr(spec, role) for role in PARTS}
    components = _components(recipe, registry, chosen)
    _check_mode(components["generator"], components["batching"], registry)
    options = _options(recipe, components.values(), as_it_stands=not any(chosen.values()))
    parts = {"recipe": recipe, **components}
    plugins = {role: registry.plugin_of(part) for role, part in parts.items()}
    needed = {plugin.origin for plugin in plugins.values()}
    for role, component in components.items():
        given = component.requires
        needed.update(_dependencies(plugins[role].origin) if given is None else given)
    return Plan(
        recipe,
        plugins,
        frozenset([*needed, *_to_constrain(components["generator"], components["formatter"])]),
        options=resolve(options, spec.options),
        notices=renamed_values(options, spec.options),
        **components,
    )


def _dependencies(distribution: str) -> Iterator[str]:
    """Go through what a distribution requires, without what only its extras do."""
    for requirement in requires(distribution) or ():
        text, _, marker = requirement.partition(";")
        if "extra" not in marker and (name := re.match(r"[\w.-]+", text)):
            yield name[0]


def _to_constrain(generator: Generator, formatter: Formatter) -> Iterator[str]:
    """What can be done without in Triton, as it can be here."""
    for name in formatter.constrains_with if generator.constrains else ():
        with suppress(PackageNotFoundError):
            version(name)
            yield name


def known_options(recipe: Recipe, registry: Registry) -> list[Option]:
    """Return the options of a recipe as it stands, for help."""
    return _options(recipe, _components(recipe, registry, {}).values())


def _components(
    recipe: Recipe, registry: Registry, chosen: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the component of each role: the one that was chosen, else the recipe's own."""
    found = {}
    for role, kind in PARTS.items():
        name = chosen.get(role) or getattr(recipe, role)
        if not chosen.get(role) and all(known.name != name for known in registry.all(kind)):
            raise PluginError(
                f"recipe {recipe.name!r} is made with the {role} {name!r}, which no plugin that "
                "can be used brings",
                mend="install the package that does; `llmserve plugins` says what is left out",
            )
        found[role] = registry.get(kind, name)
    return found


def _options(
    recipe: Recipe, components: Iterable[Component], *, as_it_stands: bool = True
) -> list[Option]:
    """All options, each with the default that the recipe gives it.

    Where a part was replaced, the recipe may have a default for an option that is gone with it.
    """
    options = {option.name: option for option in (*SOURCE_OPTIONS, *REQUEST_OPTIONS)}
    for component in components:
        for option in component.options:
            if options.setdefault(option.name, option) != option:
                raise PluginError(
                    f"{component.name!r} declares the option {option.name} otherwise than "
                    "another component does"
                )
    for name, value in recipe.defaults.items():
        if name not in options:
            if not as_it_stands:
                continue
            raise PluginError(f"recipe {recipe.name!r} has a default for no option: {name}")
        try:
            options[name] = replace(options[name], default=options[name].check(value))
        except OptionError as error:
            raise PluginError(f"recipe {recipe.name!r} has a wrong default: {error}") from None
    return list(options.values())


def _check_mode(generator: Generator, batching: Batching, registry: Registry) -> None:
    if batching.mode in generator.modes:
        return
    fits = sorted(other.name for other in registry.all(Batching) if other.mode in generator.modes)
    raise IncompatibleError(
        f"generator {generator.name!r} cannot be driven by batching {batching.name!r}",
        mend=f"choose one of {', '.join(fits)}" if fits else "choose another --plugin",
    )
