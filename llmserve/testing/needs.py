"""What a build would take, known before it is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmserve.builder.fit import needs_of
from llmserve.builder.plan import BuildSpec, make_plan
from llmserve.builder.size import size_in
from llmserve.plugins.registry import Registry
from llmserve.plugins.size import ModelSize, Needs


def read_size(model: Path) -> ModelSize:
    """Return how large the model in a folder is, which has to be known."""
    size = size_in(model)
    assert size is not None
    return size


def plan_needs(
    recipe: str, model: Path, options: Mapping[str, object], *, generator: str | None = None
) -> Needs:
    """Return what a build of a model takes, which its generator has to say."""
    spec = BuildSpec(recipe, str(model), generator=generator, options=options)
    needs = needs_of(make_plan(spec, Registry.load()), read_size(model))
    assert needs is not None
    return needs
