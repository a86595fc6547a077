"""Several models under one name: an ensemble and its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmserve.builder.context import BuildContext
from llmserve.contract.tensors import Tensor
from llmserve.errors import PluginError

STAGE = "stage"
"""The key in a part's manifest under which it names the class that answers its requests."""


@dataclass
class Part:
    """A model of the ensemble, and the components in its manifest."""

    context: BuildContext
    components: dict[str, Any] = field(default_factory=dict)


class Assembly:
    """An ensemble under construction: a generator's ``assemble`` adds parts and connects them.

    Each part has its own :class:`BuildContext`, with its own ``config`` and ``folder``. A Python
    part runs a stage class with the components that it needs; the plugin configures any other.
    If ``assemble`` does not declare tensors of the ensemble itself, it gets those of a fused model:
    ``inputs`` and ``outputs``. ``chosen`` has the name of each role's component.

    >>> def assemble(assembly: Assembly) -> None:
    ...     read = assembly.add("preprocess", backend="python")
    ...     assembly.stage(read, "acme.stages:Read", roles=("tokenizer",))
    ...     assembly.step(read, {"text_input": "text_input"}, {"ids": "ids"})
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        chosen: Mapping[str, str],
        prepare: Callable[[str, BuildContext], dict[str, Any]],
    ) -> None:
        self.context = context
        self.inputs = inputs
        self.outputs = outputs
        self.chosen = chosen
        self.parts: dict[str, Part] = {}
        self._prepare = prepare
        context.config.platform = "ensemble"

    @property
    def options(self) -> Mapping[str, Any]:
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
        """Start a part, with the arguments of :meth:`BuildContext.add_part`."""
        part = self.context.add_part(
            suffix, name=name, backend=backend, platform=platform, max_batch_size=max_batch_size
        )
        self.parts[part.name] = Part(part)
        return part

    def prepare(self, role: str, part: BuildContext) -> dict[str, Any]:
        if role not in self.chosen:
            raise PluginError(f"there is no role {role!r}")
        component = self.parts[part.name].components[role] = self._prepare(role, part)
        return component

    def stage(
        self,
        part: BuildContext,
        runtime: str,
        *,
        roles: Iterable[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Run a ``Driver`` in the Python backend as this part, with the given roles."""
        part.config.backend = "python"
        part.write_entry()
        components = self.parts[part.name].components
        components[STAGE] = {"name": part.name, "runtime": runtime, "settings": settings or {}}
        for role in roles:
            if role not in components:
                self.prepare(role, part)

    def step(
        self, part: BuildContext, inputs: Mapping[str, str], outputs: Mapping[str, str]
    ) -> None:
        """Add a step to the ensemble; both maps lead from the part's tensors to the ensemble's."""
        step = self.context.config.ensemble_scheduling.step.add(
            model_name=part.name, model_version=-1
        )
        step.input_map.update(inputs)
        step.output_map.update(outputs)
