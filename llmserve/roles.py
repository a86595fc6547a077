"""The roles a plugin can fill: frozen dataclasses that name their runtime by an import string.

A component has two lives. Here, on the machine that builds, it says what it is called, what
it can be told and what it puts into the repository. In Triton, the class that ``runtime``
names does the work; nothing imports it before that, so listing plugins loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmserve.options import Option, Value
from llmserve.runtime.contract import Tensor

if TYPE_CHECKING:
    from llmserve.builder.assembly import Assembly
    from llmserve.builder.context import BuildContext

__all__ = [
    "ROLES",
    "Batching",
    "Component",
    "Formatter",
    "Generator",
    "Option",
    "Recipe",
    "Tensor",
    "Tokenizer",
]

Prepare = Callable[["BuildContext"], Mapping[str, Any]]
"""Writes what the runtime class needs, and returns the settings it is made with (JSON)."""


Assemble = Callable[["Assembly"], None]
"""Adds the models that a generator needs beside it, and wires them into an ensemble."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """What all roles share.

    ``runtime`` is ``"package.module:Class"``, made in Triton as ``Class(settings, folder)``
    with the settings that ``prepare`` returned and the version folder it wrote to.
    ``requires`` names the distributions that the class imports: the manifest records their
    versions and the Dockerfile installs them. ``inputs`` are the tensors it reads.
    """

    name: str
    summary: str
    runtime: str
    prepare: Prepare | None = None
    options: tuple[Option, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Component):
    """Text to ids and back. Runtime: :class:`llmserve.runtime.protocols.Tokenizer`."""


@dataclass(frozen=True, kw_only=True)
class Generator(Component):
    """Ids to more ids. Runtime: :class:`llmserve.runtime.protocols.Generator`.

    ``modes`` says how it can be driven, in the words that ``Batching.mode`` uses. One that runs
    in a backend other than Python's has ``assemble``: what is built is then an ensemble of
    several models, and ``runtime`` the class of whichever of them the generator calls its own.
    ``outputs`` are what the formatter can fill only with what this generator tells, and only for
    a request that asks.
    ``weights`` are patterns of files: what ``--model`` names has to have one that matches.
    One that ``constrains`` asks ``Generation.constrain`` before it chooses a token, as
    ``llmserve.runtime.sampling.Sampler`` does, so that a formatter can hold answers to a form.
    """

    modes: frozenset[str] = frozenset({"batch"})
    weights: tuple[str, ...] = ("*.safetensors",)
    assemble: Assemble | None = None
    outputs: tuple[Tensor, ...] = ()
    constrains: bool = False


@dataclass(frozen=True, kw_only=True)
class Batching(Component):
    """How requests share the machine. Runtime: :class:`llmserve.runtime.protocols.Driver`.

    ``mode`` is what it asks of a generator: ``"batch"`` hands over whole batches. ``prepare``
    edits the scheduler blocks of ``context.config`` and may set ``context.exchange``.
    """

    mode: str = "batch"


@dataclass(frozen=True, kw_only=True)
class Formatter(Component):
    """Answers to response tensors. Runtime: :class:`llmserve.runtime.protocols.Formatter`.

    One whose runtime class can ``constrain`` answers names the wishes for that in ``inputs``.
    Where the generator cannot do it, a request with such a wish is refused.
    """

    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One choice per role under a name: what ``--plugin`` selects.

    ``defaults`` replaces defaults of the components' options; ``client`` is the module whose
    source becomes the emitted ``client.py``.
    """

    name: str
    summary: str
    tokenizer: str
    generator: str
    batching: str
    formatter: str
    defaults: Mapping[str, Value] = field(default_factory=dict)
    client: str = "llmserve.client.script"


ROLES: dict[str, type[Component] | type[Recipe]] = {
    "tokenizer": Tokenizer,
    "generator": Generator,
    "batching": Batching,
    "formatter": Formatter,
    "recipe": Recipe,
}
"""Every role by its name, in the order in which a request meets them."""
