"""One model that does it all: what a generator of the Python backend becomes."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve import modelconfig
from llmserve.builder.context import BuildContext
from llmserve.builder.papers import (
    described,
    write_client,
    write_config,
    write_entry,
    write_manifest,
)
from llmserve.builder.plan import Plan
from llmserve.manifest import Manifest


def write_fused(plan: Plan, context: BuildContext, packages: Mapping[str, str]) -> Manifest:
    """Write a model's folder: entry, files, configuration, client and, last, the manifest."""
    config = context.config
    config.backend = "python"
    modelconfig.add_inputs(config, plan.inputs)
    modelconfig.add_outputs(config, (*plan.formatter.outputs, *plan.generator.outputs))
    write_entry(context)
    components = {
        role: described(component, component.prepare(context) if component.prepare else {})
        for role, component in plan.components()
    }
    write_config(plan, context)
    write_client(plan, context)
    return write_manifest(plan, context, components, packages)
