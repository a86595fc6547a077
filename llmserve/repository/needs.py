"""What a built model takes on this machine, as its generator says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from llmserve.errors import LLMServeError
from llmserve.plugins.options import Value
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import Generator
from llmserve.plugins.size import AdapterSize, ModelSize, Needs, needs_with_draft
from llmserve.repository.repository import Model


@dataclass(frozen=True)
class Smaller:
    """A change of a build's options that makes a model smaller, and what it takes then."""

    changes: Mapping[str, Value]
    needs: Needs

    def __str__(self) -> str:
        return " ".join(f"--set {name}={value}" for name, value in self.changes.items())


def needs_of(model: Model, registry: Registry) -> Needs | None:
    """Return what a model takes; None if llmserve did not build it, or its plugin does not say."""
    return _needs(model, registry, {})


def smaller(model: Model, registry: Registry) -> Iterator[Smaller]:
    """Yield what could be built instead of a model, the change that costs least first."""
    needs = needs_of(model, registry)
    for changes in needs.instead if needs else ():
        if found := _needs(model, registry, changes):
            yield Smaller(changes, found)


def _needs(model: Model, registry: Registry, changes: Mapping[str, Value]) -> Needs | None:
    manifest = model.manifest
    named = manifest.components.get("generator") if manifest else None
    if manifest is None or not manifest.size or not named:
        return None
    try:
        generator = registry.get(Generator, str(named.get("name")))
        options = {**manifest.options, **changes}
        size = replace(ModelSize.read(manifest.size), adapters=_adapters(model))
        return needs_with_draft(generator.needs, size, options) if generator.needs else None
    except (LLMServeError, TypeError, KeyError, ValueError):
        # The plugin is not here, or is one of another time.
        return None


def _adapters(model: Model) -> tuple[AdapterSize, ...]:
    """Return how large the adapters are that a model has now; what is wrong with one is no size."""
    from llmserve.runtime.lora import Lora, adapters_of

    found = adapters_of(model.last_version).values()
    return tuple(AdapterSize.of(each) for each in found if isinstance(each, Lora))
