"""Several models under one name: an ensemble, and the parts that it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
from llmserve.errors import PluginError
from llmserve.manifest import Manifest
from llmserve.naming import check_model_name
from llmserve.roles import Component

STAGE = "stage"
"""Where a part's manifest names the class that answers its requests."""


@dataclass
class _Part:
    context: BuildContext
    components: dict[str, Any] = field(default_factory=dict)


class Assembly:
    """What a generator's ``assemble`` works with: it adds parts and wires them together.

    Each part is a :class:`BuildContext` of its own, whose ``config`` and ``folder`` are the
    part's. A Python part runs a stage class with the components it asks for; any other is
    configured by the plugin. What is not declared on the ensemble itself is what a fused model
    would declare.

    >>> def assemble(assembly: Assembly) -> None:
    ...     read = assembly.add("preprocess", backend="python")
    ...     assembly.stage(read, "acme.stages:Read", roles=("tokenizer",))
    ...     assembly.step(read, {"text_input": "text_input"}, {"ids": "ids"})
    """

    def __init__(self, plan: Plan, context: BuildContext) -> None:
        self.plan = plan
        self.context = context
        self._parts: dict[str, _Part] = {}
        self._prepared: dict[str, Any] = {}
        context.config.platform = "ensemble"

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the build."""
        return self.context.options

    def add(
        self,
        suffix: str = "",
        *,
        name: str | None = None,
        backend: str = "",
        platform: str = "",
        max_batch_size: int | None = None,
    ) -> BuildContext:
        """Begin a part called ``NAME_suffix``, or as ``name`` says.

        Without a ``max_batch_size`` it has that of the ensemble.
        """
        name = check_model_name(name or f"{self.context.name}_{suffix}")
        if name in self._parts or name == self.context.name:
            raise PluginError(f"two models of one build are called {name!r}")
        size = self.context.config.max_batch_size if max_batch_size is None else max_batch_size
        config = modelconfig.new_config(name, backend=backend, max_batch_size=size)
        config.platform = platform
        part = self.context.sibling(name, config)
        part.folder.mkdir(parents=True)
        self._parts[name] = _Part(part)
        return part

    def prepare(self, role: str, part: BuildContext) -> dict[str, Any]:
        """Let a role's component put its files and settings into a part."""
        component = self._component(role)
        settings = component.prepare(part) if component.prepare else {}
        made = self._parts[part.name].components[role] = described(component, settings)
        self._prepared.setdefault(role, made)
        return made

    def stage(
        self,
        part: BuildContext,
        runtime: str,
        *,
        roles: Iterable[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Make a part run a class of the Python backend: a ``Driver`` with the roles it names."""
        part.config.backend = "python"
        write_entry(part)
        components = self._parts[part.name].components
        components[STAGE] = {"name": part.name, "runtime": runtime, "settings": settings or {}}
        for role in roles:
            if role not in components:
                self.prepare(role, part)

    def step(
        self, part: BuildContext, inputs: Mapping[str, str], outputs: Mapping[str, str]
    ) -> None:
        """Add a step to the ensemble; both maps lead from the part's tensors to its own."""
        step = self.context.config.ensemble_scheduling.step.add(
            model_name=part.name, model_version=-1
        )
        step.input_map.update(inputs)
        step.output_map.update(outputs)

    def finish(self, packages: Mapping[str, str]) -> Manifest:
        """Write every model's papers; the ensemble's name all the others."""
        for role, component in self.plan.components():
            if role not in self._prepared:
                raise PluginError(f"{role} {component.name!r} was chosen and is in no model")
        config = self.context.config
        if not config.input:
            modelconfig.add_inputs(config, self.plan.inputs)
        if not config.output:
            modelconfig.add_outputs(config, self.plan.formatter.outputs)
        self.context.folder.mkdir(parents=True)
        # Triton wants a version folder even of a model without files, and git keeps no empty one.
        (self.context.folder / ".keep").touch()
        for part in self._parts.values():
            write_config(self.plan, part.context)
            # The packages are the ensemble's: all run in the same environment.
            write_manifest(self.plan, part.context, part.components, {}, part_of=self.context.name)
        write_config(self.plan, self.context, parts=tuple(self._parts))
        write_client(self.plan, self.context)
        return write_manifest(
            self.plan, self.context, self._prepared, packages, parts=tuple(self._parts)
        )

    def _component(self, role: str) -> Component:
        for name, component in self.plan.components():
            if name == role:
                return component
        raise PluginError(f"there is no role {role!r}")
