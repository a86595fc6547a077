"""What a model's weights are, and which plugins take them: kept in their bits, or widened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from llmserve.builder.fit import needs_of
from llmserve.builder.gguf.keep import KEPT
from llmserve.builder.plan import BuildSpec, make_plan
from llmserve.builder.size import size_of
from llmserve.contract.tasks import TOKENS
from llmserve.errors import LLMServeError
from llmserve.plugins.quantised import Quantised, Treatment
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import Generator, Recipe
from llmserve.plugins.size import ModelSize

_LEAST_NAMED = 0.005
"""The share of a file's weights from which on their type is named."""
FORMS = (
    Quantised("gptq", 4),
    Quantised("gptq", 4, act_order=True),
    Quantised("gptq", 8),
    Quantised("awq", 4, form="gemm"),
    Quantised("compressed-tensors", 4, form="pack-quantized"),
    Quantised("compressed-tensors", 8, form="int-quantized"),
    Quantised("compressed-tensors", 8, form="float-quantized"),
    Quantised("fp8"),
    Quantised("mxfp4"),
    Quantised("bitsandbytes"),
)
"""The checkpoints that people have, by which it is told what a plugin takes."""


@dataclass(frozen=True)
class Taker:
    """A plugin that computes a model, and what the weights take in memory; 0 if not known."""

    plugin: str
    treatment: Treatment
    weights: int = 0


@dataclass(frozen=True)
class Weights:
    """The weights of a model: what they are, and who takes them."""

    what: str
    parameters: int
    bytes: int
    takers: tuple[Taker, ...]


def weights_of(model: str, registry: Registry) -> Weights | None:
    """Return what the weights of a model are; None if that cannot be read without loading them."""
    if (size := size_of(model)) is None:
        return None
    takers = tuple(_takers(model, size, registry))
    return Weights(_what(size), size.parameters, size.bytes, takers)


def checkpoints_taken(recipe: Recipe, registry: Registry) -> Mapping[Treatment, list[str]]:
    """Name the quantised checkpoints that a plugin keeps in their bits, and those it widens."""
    found: dict[Treatment, list[str]] = {"kept": [], "widened": []}
    generator = registry.get(Generator, recipe.generator)
    for form in FORMS if _takes_checkpoints(generator) else ():
        if treatment := generator.quantised(form):
            found[treatment].append(str(form))
    return found


def _takers(model: str, size: ModelSize, registry: Registry) -> Iterator[Taker]:
    for recipe in registry.all(Recipe):
        with suppress(LLMServeError):
            generator = registry.get(Generator, recipe.generator)
            plan = make_plan(BuildSpec(recipe.name, model), registry)
            # What suits no device is for models of few kinds.
            if not _takes_checkpoints(generator) or not (recipe.suits or size.packed):
                continue
            treatment: Treatment = "kept"
            if size.packed:
                treatment = generator.quantised(size.packed.quantised)
            elif size.is_gguf:
                is_kept = generator.keeps_gguf(plan.options) and _is_kept(size.kinds)
                treatment = "kept" if is_kept or _is_half(size) else "widened"
            if treatment:
                needs = needs_of(plan, size)
                yield Taker(recipe.name, treatment, needs.weights if needs else 0)


def _takes_checkpoints(generator: Generator) -> bool:
    return generator.source == "huggingface" and generator.answers == TOKENS


def _what(size: ModelSize) -> str:
    if size.packed:
        return str(size.packed.quantised)
    return f"GGUF, {_mix(size.kinds)}" if size.is_gguf and size.kinds else size.dtype


def _mix(kinds: Mapping[str, int]) -> str:
    """Name the types of a file's weights, the one of most of them first."""
    total = sum(kinds.values())
    ordered = sorted(kinds.items(), key=lambda each: -each[1])
    named = [(kind or "another type", n / total) for kind, n in ordered if n / total > _LEAST_NAMED]
    if len(named) == 1:
        return named[0][0]
    return ", ".join(f"{kind} {share:.0%}" for kind, share in named)


def _is_kept(kinds: Mapping[str, int]) -> bool:
    """Return whether a file's weights stay in their blocks: most of them are of such types."""
    return 2 * sum(kinds[kind] for kind in kinds.keys() & {*KEPT}) >= sum(kinds.values())


def _is_half(size: ModelSize) -> bool:
    """Return whether a file has weights that are not smaller than those they are converted to."""
    return not size.kinds.keys() - {"F16", "BF16", "F32"}
