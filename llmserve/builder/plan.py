"""From a spec to a plan: components chosen, options checked, what cannot work refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from llmserve.builder.common import REQUEST_OPTIONS, SOURCE_OPTIONS
from llmserve.builder.spec import BuildSpec
from llmserve.errors import IncompatibleError, PluginError
from llmserve.options import Option, Value, resolve
from llmserve.registry import Registry
from llmserve.roles import Batching, Component, Formatter, Generator, Recipe, Tokenizer
from llmserve.runtime.contract import MESSAGES, SAMPLING, TEXT_FORMAT_INPUTS, TEXT_INPUT, Tensor
from llmserve.runtime.params import READERS

C = TypeVar("C", bound=Component)
CONTRACT = frozenset(READERS) | {
    tensor.name for tensor in (TEXT_INPUT, MESSAGES, *SAMPLING, *TEXT_FORMAT_INPUTS)
}
"""The names that every model knows, whether it takes them or not."""


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first file is written."""

    recipe: Recipe
    origin: str
    origins: frozenset[str]
    """The distributions that the recipe and every chosen component come from."""
    tokenizer: Tokenizer
    generator: Generator
    batching: Batching
    formatter: Formatter
    options: Mapping[str, Value]

    def components(self) -> Iterator[tuple[str, Component]]:
        """Go through the four roles in the order in which a request meets them."""
        yield "tokenizer", self.tokenizer
        yield "generator", self.generator
        yield "batching", self.batching
        yield "formatter", self.formatter

    @property
    def extras(self) -> frozenset[str]:
        """The wishes that are nobody's but this generator's and this formatter's."""
        return _own(self.generator) | _own(self.formatter)

    @property
    def ungranted(self) -> frozenset[str]:
        """The formatter's wishes where the generator cannot be constrained: they are refused."""
        granted = self.generator.constrains
        return frozenset() if granted else _own(self.formatter) - _own(self.generator)

    @property
    def inputs(self) -> list[Tensor]:
        """The model's inputs: the text, and what each component reads beside it."""
        tensors = {TEXT_INPUT.name: TEXT_INPUT}
        for role, component in self.components():
            for tensor in component.inputs:
                if tensor.name in self.ungranted:
                    continue
                if tensors.setdefault(tensor.name, tensor) != tensor:
                    raise IncompatibleError(
                        f"{role} {component.name!r} declares {tensor.name} otherwise than "
                        "another component does"
                    )
        # Where messages can take its place, the text need not be sent.
        if "messages" in tensors:
            tensors[TEXT_INPUT.name] = replace(TEXT_INPUT, optional=True)
        return list(tensors.values())


def _own(component: Component) -> frozenset[str]:
    return frozenset(tensor.name for tensor in component.inputs) - CONTRACT


def make_plan(spec: BuildSpec, registry: Registry) -> Plan:
    """Choose the components, resolve every option and refuse what cannot work together."""
    recipe = registry.recipe(spec.plugin)
    generator = registry.part(Generator, recipe.generator, of=recipe)
    batching = _chosen(registry, Batching, spec.batching, recipe.batching, recipe)
    _check_mode(generator, batching, registry)
    tokenizer = _chosen(registry, Tokenizer, spec.tokenizer, recipe.tokenizer, recipe)
    formatter = _chosen(registry, Formatter, spec.formatter, recipe.formatter, recipe)
    components = (tokenizer, generator, batching, formatter)
    options = _options(recipe, components)
    return Plan(
        recipe,
        registry.plugin_of(recipe).origin,
        frozenset(registry.plugin_of(part).origin for part in (recipe, *components)),
        tokenizer,
        generator,
        batching,
        formatter,
        resolve(options, spec.options),
    )


def known_options(recipe: Recipe, registry: Registry) -> list[Option]:
    """Return the options of a recipe as it stands, for help."""
    return _options(
        recipe,
        (
            registry.part(Tokenizer, recipe.tokenizer, of=recipe),
            registry.part(Generator, recipe.generator, of=recipe),
            registry.part(Batching, recipe.batching, of=recipe),
            registry.part(Formatter, recipe.formatter, of=recipe),
        ),
    )


def _chosen(registry: Registry, kind: type[C], asked: str | None, own: str, recipe: Recipe) -> C:
    return registry.get(kind, asked) if asked else registry.part(kind, own, of=recipe)


def _options(recipe: Recipe, components: tuple[Component, ...]) -> list[Option]:
    """All options, each with the default that the recipe gives it."""
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
            raise PluginError(f"recipe {recipe.name!r} has a default for no option: {name}")
        options[name] = replace(options[name], default=options[name].check(value))
    return list(options.values())


def _check_mode(generator: Generator, batching: Batching, registry: Registry) -> None:
    if batching.mode in generator.modes:
        return
    fits = sorted(other.name for other in registry.all(Batching) if other.mode in generator.modes)
    raise IncompatibleError(
        f"generator {generator.name!r} cannot be driven by batching {batching.name!r}",
        mend=f"choose one of {', '.join(fits)}" if fits else "choose another --plugin",
    )
