"""Several models under one name: an ensemble, and the parts that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmserve.builder.context import BuildContext
from llmserve.errors import PluginError
from llmserve.names import check_model_name
from llmserve.repository import config as modelconfig
from llmserve.runtime.contract import Tensor

STAGE = "stage"
"""Where a part's manifest names the class that answers its requests."""


@dataclass
class Part:
    """A model of the ensemble, and what its manifest says of the components in it."""

    context: BuildContext
    components: dict[str, Any] = field(default_factory=dict)


class Assembly:
    """What a generator's ``assemble`` works with: it adds parts and wires them together.

    Each part is a :class:`BuildContext` of its own, whose ``config`` and ``folder`` are the
    part's. A Python part runs a stage class with the components it asks for; any other is
    configured by the plugin. What is not declared on the ensemble itself is what a fused model
    would declare: ``inputs`` and ``outputs``. ``chosen`` has the name of each role's component.

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
        """Begin a part called ``NAME_suffix``, or as ``name`` says.

        Without a ``max_batch_size`` it has that of the ensemble.
        """
        name = check_model_name(name or f"{self.context.name}_{suffix}")
        if name in self.parts or name == self.context.name:
            raise PluginError(f"two models of one build are called {name!r}")
        size = self.context.config.max_batch_size if max_batch_size is None else max_batch_size
        config = modelconfig.new_config(name, backend=backend, max_batch_size=size)
        config.platform = platform
        part = self.context.sibling(name, config)
        part.folder.mkdir(parents=True)
        self.parts[name] = Part(part)
        return part

    def prepare(self, role: str, part: BuildContext) -> dict[str, Any]:
        if role not in self.chosen:
            raise PluginError(f"there is no role {role!r}")
        made = self.parts[part.name].components[role] = self._prepare(role, part)
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
        part.write_entry()
        components = self.parts[part.name].components
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
