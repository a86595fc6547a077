"""Makes a plan from a spec: chooses components, resolves options, refuses what cannot work."""

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
from llmserve.contract.options import DEFAULT_LENGTH, FORMS, OPTIONS
from llmserve.contract.tasks import TOKENS
from llmserve.contract.tensors import MESSAGES, PROMPT_REPORT, TEXT_INPUT, TEXT_PAIR, Tensor
from llmserve.errors import (
    TRACEBACK,
    IncompatibleError,
    LLMServeError,
    OptionError,
    PluginError,
    reason,
)
from llmserve.hardware import has_gpu, kind_of
from llmserve.names import check_model_name, closest, model_name_from, near, normal
from llmserve.packages import install_command
from llmserve.plugins.options import Option, Value, renamed_values, resolve
from llmserve.plugins.registry import Plugin, Registry
from llmserve.plugins.roles import (
    MODEL_ROLES,
    Batching,
    Component,
    Formatter,
    Generator,
    Recipe,
    Tokenizer,
)
from llmserve.repository.manifest import Manifest

SOURCE_OPTIONS = (
    Option("revision", "", "Branch, tag or commit of a model on the hub."),
    Option(
        "weights",
        "auto",
        "copy puts the model's files into the repository, reference leaves them where they are; "
        "auto copies those of local folders and leaves those of the hub in its cache.",
        choices=("auto", "copy", "reference"),
    ),
    Option("trust_remote_code", False, "Run Python code that ships with the model."),
    Option("pickle", False, "Load pickled weights, which can run code."),
)

REQUEST_OPTIONS = (
    Option(
        "max_tokens",
        0,
        "Maximum answer length, unless the request sets one; 0 means "
        f"{DEFAULT_LENGTH}, and through the OpenAI API what is left of the context.",
        minimum=0,
    ),
    Option("stream", False, "Stream answers, unless the request says otherwise."),
    Option("chat", False, "Treat text_input as a user's message in the model's chat template."),
    Option("echo", False, "Start the answer with the prompt, as Triton's tutorial does."),
)


DEFAULT_OUTPUT = Path("model_repository")


@dataclass(frozen=True)
class BuildSpec:
    """One model to build: a recipe, a model source, and changes to the recipe's defaults."""

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
    vendor: bool = False
    """Whether to put the wheels of llmserve and of the plugins beside the Dockerfile."""

    @property
    def model_name(self) -> str:
        return check_model_name(self.name or model_name_from(self.model))


@dataclass(frozen=True)
class BuildResult:
    """A built model: its location, manifest and Docker commands."""

    name: str
    repository: Path
    manifest: Manifest
    dockerfile: Path
    docker_build: str
    docker_run: str
    without_index: tuple[str, ...] = ()
    """The packages that the Docker build may not find: neither is an index known to have them, nor
    are their wheels beside the Dockerfile."""

    @property
    def folder(self) -> Path:
        return self.repository / self.name


def needed_packages(plan: Plan) -> dict[str, str]:
    """Return the packages of the plan with the versions that are installed here.

    They always include the distributions of the components themselves.
    """
    return installed_packages(plan, ("llmserve", *plan.needed))


def installed_packages(plan: Plan, names: Iterable[str]) -> dict[str, str]:
    """Return packages that a plan needs with the versions that are installed here."""
    versions = {}
    for name in sorted({normal(name) for name in names}):
        if not re.fullmatch(r"[\w-]+", name):
            raise PluginError(
                f"--plugin {plan.recipe.name} requires {name!r}, which is not a distribution name",
                hint="ranges and extras belong in the dependencies of its pyproject.toml",
            )
        try:
            # Package indexes do not have versions with a local suffix such as +cpu.
            versions[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            raise PluginError(
                f"--plugin {plan.recipe.name} needs {name}, which is not installed",
                hint=install_command(name),
            ) from None
    return versions


CONTRACT = frozenset(OPTIONS) | {
    tensor.name
    for tensor in (
        TEXT_INPUT,
        TEXT_PAIR,
        MESSAGES,
        *(t for row in OPTIONS.values() for t in row.inputs),
    )
}
"""The input names that every model recognizes, whether it accepts them or not."""

_FORMS = frozenset(tensor.name for tensor in FORMS)
_OF_TOKENS = frozenset(name for name, row in OPTIONS.items() if row.of_tokens)


@dataclass(frozen=True)
class Plan:
    """All decisions of a build, made before the first file is written."""

    recipe: Recipe
    plugins: Mapping[str, Plugin]
    """The plugins that provide the recipe and the components, by role."""
    needed: frozenset[str]
    """The distributions that the recipe and every chosen component come from and require."""
    tokenizer: Tokenizer
    generator: Generator
    batching: Batching
    formatter: Formatter
    options: Mapping[str, Value]
    notices: Sequence[str] = ()
    """Messages to the user about the options of the build."""

    def prepare(self, role: str, context: BuildContext) -> dict[str, Any]:
        """Let a component write its files, and return its entry in the manifest."""
        component: Component = getattr(self, role)
        with self.errors_of(role, "prepare"):
            settings = component.prepare(context) if component.prepare else {}
            if not isinstance(settings, Mapping):
                raise TypeError(f"it returned {settings!r} instead of a mapping")
            json.dumps(dict(settings), allow_nan=False)
        return {"name": component.name, "runtime": component.runtime, "settings": dict(settings)}

    @contextmanager
    def errors_of(self, role: str, function: str) -> Iterator[None]:
        """Name the component in unexpected errors of its code."""
        try:
            yield
        except (LLMServeError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            raise PluginError(
                f"{function} of {self.describe(role)} failed: {reason(error)}",
                hint=f"report it to its author; {TRACEBACK}=1 shows where",
            ) from error

    def describe(self, role: str) -> str:
        """Return a role's component and its plugin, for error messages."""
        return f"{role} {getattr(self, role).name!r} of plugin {self.plugins[role]}"

    def components(self) -> Iterator[tuple[str, Component]]:
        return ((role, getattr(self, role)) for role in MODEL_ROLES)

    @property
    def extras(self) -> frozenset[str]:
        """The inputs that only this generator and this formatter define."""
        return _own(self.generator) | _own(self.formatter)

    @property
    def inputs(self) -> list[Tensor]:
        """The model's inputs: the text, and the inputs of each component.

        If the generator cannot be constrained, the formatter's inputs for that are left out, except
        those that the generator declares itself, and requests with them are refused. So are the
        options that only an answer of tokens can have, if it answers with values.
        """
        of_generator = {tensor.name for tensor in self.generator.inputs}
        left_out = (_own(self.formatter) | _FORMS) - of_generator
        impossible = frozenset() if self.generator.answers == TOKENS else _OF_TOKENS
        tensors = {TEXT_INPUT.name: TEXT_INPUT}
        for role, component in self.components():
            for tensor in component.inputs:
                if tensor.name in impossible:
                    continue
                if tensor.name in left_out and not self.generator.constrains:
                    continue
                if tensors.setdefault(tensor.name, tensor) != tensor:
                    raise IncompatibleError(
                        f"{role} {component.name!r} declares {tensor.name} differently "
                        "than another component"
                    )
        # The text is optional if messages can be sent instead.
        if MESSAGES.name in tensors:
            tensors[TEXT_INPUT.name] = replace(TEXT_INPUT, optional=True)
        return list(tensors.values())

    @property
    def outputs(self) -> list[tuple[Tensor, bool]]:
        """The model's outputs, each with whether a response may be without it.

        The formatter always fills in its own, and the generator's if their data is there.
        """
        report = () if self.generator.answers == TOKENS else (PROMPT_REPORT,)
        always = [(tensor, False) for tensor in self.formatter.outputs]
        return always + [(tensor, True) for tensor in (*report, *self.generator.outputs)]


def _own(component: Component) -> frozenset[str]:
    return frozenset(tensor.name for tensor in component.inputs) - CONTRACT


def make_plan(spec: BuildSpec, registry: Registry) -> Plan:
    """Choose the components and resolve every option; refuse what cannot work together."""
    recipe = registry.recipe(spec.plugin)
    chosen = {role: getattr(spec, role) for role in MODEL_ROLES}
    components = _components(recipe, registry, chosen)
    _check_mode(components["generator"], components["batching"], registry)
    _check_answers(components["generator"], components["formatter"], registry)
    options = _options(recipe, components.values(), unmodified=not any(chosen.values()))
    _refuse_unknown(spec.options, options, recipe, registry)
    registered = {"recipe": recipe, **components}
    plugins = {role: registry.plugin_of(component) for role, component in registered.items()}
    needed = {plugin.origin for plugin in plugins.values()}
    for role, component in components.items():
        required = component.requires
        needed.update(dependencies_of(plugins[role].origin) if required is None else required)
    resolved = resolve(options, spec.options)
    return Plan(
        recipe,
        plugins,
        frozenset(
            [*needed, *_constraining_packages(components["generator"], components["formatter"])]
        ),
        options=resolved,
        notices=[*renamed_values(options, spec.options), *_about_gpu(resolved)],
        **components,
    )


def _about_gpu(options: Mapping[str, Value]) -> Iterator[str]:
    """Yield a notice if the model is for a GPU, and this machine has none."""
    device = str(options.get("device", ""))
    if kind_of(device) == "cuda" and not has_gpu():
        yield (
            f"note: this machine has no NVIDIA GPU, which device={device} needs: the model can be "
            "loaded only elsewhere, as in its image on a machine with one"
        )


def _refuse_unknown(
    given: Mapping[str, object], options: Iterable[Option], recipe: Recipe, registry: Registry
) -> None:
    """Refuse an option that is not here, and name the plugins that have it."""
    names = {option.name for option in options}
    for name in given:
        if name in names:
            continue
        listed = f"llmserve plugins {recipe.name}"
        others = [] if closest(name, names) else _recipes_with(name, registry)
        if others:
            hint = f"{', '.join(others)} {'has' if len(others) == 1 else 'have'} it; see {listed}"
        else:
            hint = near(name, names, place=listed)
        raise OptionError(f"no option {name!r} here", hint=hint)


def _recipes_with(option: str, registry: Registry) -> list[str]:
    found = []
    for recipe in registry.all(Recipe):
        # One whose parts are missing has no options.
        with suppress(PluginError):
            if any(option == other.name for other in known_options(recipe, registry)):
                found.append(recipe.name)
    return found


def dependencies_of(distribution: str) -> Iterator[str]:
    """Yield what a distribution depends on here, without its extras."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in requires(distribution) or ():
        with suppress(InvalidRequirement):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement.name


def _constraining_packages(generator: Generator, formatter: Formatter) -> Iterator[str]:
    """Yield the installed packages for constrained answers; they are optional in Triton too."""
    for name in formatter.constrains_with if generator.constrains else ():
        with suppress(PackageNotFoundError):
            version(name)
            yield name


def known_options(recipe: Recipe, registry: Registry) -> list[Option]:
    """Return the options of an unmodified recipe, for help."""
    return _options(recipe, _components(recipe, registry, {}).values())


def _components(
    recipe: Recipe, registry: Registry, chosen: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the component of each role: the chosen one, else the recipe's."""
    components = {}
    for role, kind in MODEL_ROLES.items():
        name = chosen.get(role) or getattr(recipe, role)
        if not chosen.get(role) and all(other.name != name for other in registry.all(kind)):
            raise PluginError(
                f"recipe {recipe.name!r} uses the {role} {name!r}, which no usable plugin provides",
                hint="install the package that does; `llmserve plugins` shows what is left out",
            )
        components[role] = registry.get(kind, name)
    return components


def _options(
    recipe: Recipe, components: Iterable[Component], *, unmodified: bool = True
) -> list[Option]:
    """Return all options, with the recipe's defaults.

    If a component was replaced, the recipe may have defaults for options of the original one.
    """
    components = list(components)
    of_tokens = all(getattr(component, "answers", TOKENS) == TOKENS for component in components)
    known = (*SOURCE_OPTIONS, *(REQUEST_OPTIONS if of_tokens else ()))
    options = {option.name: option for option in known}
    for component in components:
        for option in component.options:
            if options.setdefault(option.name, option) != option:
                raise PluginError(
                    f"{component.name!r} declares the option {option.name} differently "
                    "than another component"
                )
    for name, value in recipe.defaults.items():
        if name not in options:
            if not unmodified:
                continue
            raise PluginError(f"recipe {recipe.name!r} has a default for an unknown option: {name}")
        try:
            options[name] = replace(options[name], default=options[name].check(value))
        except OptionError as error:
            raise PluginError(f"recipe {recipe.name!r} has an invalid default: {error}") from None
    return list(options.values())


def _check_mode(generator: Generator, batching: Batching, registry: Registry) -> None:
    if batching.mode in generator.modes:
        return
    fits = sorted(other.name for other in registry.all(Batching) if other.mode in generator.modes)
    raise IncompatibleError(
        f"generator {generator.name!r} cannot be driven by batching {batching.name!r}",
        hint=f"choose one of {', '.join(fits)}" if fits else "choose another --plugin",
    )


def _check_answers(generator: Generator, formatter: Formatter, registry: Registry) -> None:
    if generator.answers == formatter.answers:
        return
    fits = sorted(f.name for f in registry.all(Formatter) if f.answers == generator.answers)
    raise IncompatibleError(
        f"generator {generator.name!r} answers with {generator.answers}, and formatter "
        f"{formatter.name!r} formats {formatter.answers}",
        hint=f"choose one of {', '.join(fits)}" if fits else "choose another --plugin",
    )
