"""What the models of a build are called."""

from __future__ import annotations

from llmserve.builder.assembly import Assembly
from llmserve.builder.context import BuildContext

ENSEMBLE = "ensemble"


def add(assembly: Assembly, name: str) -> BuildContext:
    """Add a part: under NVIDIA's own name beside an ``ensemble``, else after the build's name."""
    if assembly.context.name == ENSEMBLE:
        return assembly.add(name=name)
    return assembly.add(name)
