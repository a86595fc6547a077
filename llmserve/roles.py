"""The roles a plugin can fill: frozen dataclasses that name their runtime by an import string.

A component has two lives. Here, on the machine that builds, it says what it is called, what
it can be told and what it puts into the repository. In Triton, the class that ``runtime``
names does the work; nothing imports it before that, so listing plugins loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmserve.options import Option as Option
from llmserve.options import Value
from llmserve.runtime import contract
from llmserve.runtime.contract import Tensor as Tensor

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext

Prepare = Callable[["BuildContext"], Mapping[str, Any]]
"""Writes what the runtime class needs, and returns the settings it is made with (JSON)."""

Assemble = Callable[[Any], None]
"""Adds the models that a generator needs beside it. It gets an ``Assembly``, which is made of
components: naming its type here would be a circle."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """What the roles share that run in Triton.

    ``runtime`` is ``"package.module:Class"``, made in Triton as ``Class(settings, folder)``
    with the settings that ``prepare`` returned and the version folder it wrote to.
    ``requires`` names the distributions that the class imports: the manifest records their
    versions and the Dockerfile installs them. Where it is not given, they are those that the
    plugin's own distribution depends on. ``inputs`` are the tensors it reads.
    """

    name: str
    summary: str
    runtime: str
    prepare: Prepare | None = None
    options: tuple[Option, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    requires: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Component):
    """Text to ids and back. Runtime: :class:`llmserve.runtime.Tokenizer`."""


@dataclass(frozen=True, kw_only=True)
class Generator(Component):
    """Ids to more ids. Runtime: :class:`llmserve.runtime.Generator`.

    ``modes`` says how it can be driven, in the words that ``Batching.mode`` uses. One that runs
    in a backend other than Python's has ``assemble``: what is built is then an ensemble of
    several models, and ``runtime`` the class of whichever of them the generator calls its own.
    ``outputs`` are what the formatter can fill only with what this generator tells, and only for
    a request that asks.
    ``source`` says what ``--model`` has to name: ``"huggingface"`` a model as ``save_pretrained``
    writes it, in a folder or on the hub, with its ``config.json``; ``"folder"`` any local folder;
    None nothing in particular, which is for engines that bring or fetch their own model.
    ``weights`` are patterns of files: a model or folder has to have one that matches.
    One that ``constrains`` asks ``Generation.constrain`` before it chooses a token, as
    ``llmserve.runtime.Sampler`` does, so that a formatter can hold answers to a form.
    """

    modes: frozenset[str] = frozenset({"batch"})
    source: Literal["huggingface", "folder"] | None = "huggingface"
    weights: tuple[str, ...] = ("*.safetensors",)
    assemble: Assemble | None = None
    outputs: tuple[Tensor, ...] = ()
    constrains: bool = False


@dataclass(frozen=True, kw_only=True)
class Batching(Component):
    """How requests share the machine. Runtime: :class:`llmserve.runtime.Driver`.

    ``mode`` is what it asks of a generator: ``"batch"`` hands over whole batches. ``prepare``
    edits the scheduler blocks of ``context.config``, and calls ``context.streams()`` where answers
    leave in pieces.
    """

    mode: str = "batch"
    inputs: tuple[Tensor, ...] = (
        contract.MAX_TOKENS,
        contract.STREAM,
        contract.STOP_WORDS,
        contract.INPUT_IDS,
        contract.PROMPT_ONLY,
    )


@dataclass(frozen=True, kw_only=True)
class Formatter(Component):
    """Answers to response tensors. Runtime: :class:`llmserve.runtime.Formatter`.

    It has the tensors of the contract, and with ``extra_inputs`` and ``extra_outputs`` its own. One
    whose runtime class can ``constrain`` answers names the options for that in ``extra_inputs``;
    where the generator cannot do it, a request with such an option is refused.
    """

    inputs: tuple[Tensor, ...] = contract.TEXT_FORMAT_INPUTS
    outputs: tuple[Tensor, ...] = contract.TEXT_FORMAT_OUTPUTS
    extra_inputs: InitVar[tuple[Tensor, ...]] = ()
    extra_outputs: InitVar[tuple[Tensor, ...]] = ()

    def __post_init__(
        self, extra_inputs: tuple[Tensor, ...], extra_outputs: tuple[Tensor, ...]
    ) -> None:
        object.__setattr__(self, "inputs", (*self.inputs, *extra_inputs))
        object.__setattr__(self, "outputs", (*self.outputs, *extra_outputs))


@dataclass(frozen=True)
class Pair:
    """Two builds worth comparing, under a name that ``compare --pair`` takes.

    ``first`` is what ``second`` is measured against. Both are written as ``compare`` reads them,
    ``label=recipe:option=value``. ``common`` are options of both, used where a recipe has them and
    none of ``unless`` is set by the user.

    >>> pair = Pair("sizes", "small=acme:size=1", "large=acme:size=8", {"seed": "7"}, ("weights",))
    >>> pair.defaults({}), pair.defaults({"weights": "none"})
    ({'seed': '7'}, {})
    """

    name: str
    first: str
    second: str
    common: Mapping[str, str] = field(default_factory=dict)
    unless: tuple[str, ...] = ()

    def defaults(self, asked: Mapping[str, str]) -> Mapping[str, str]:
        """Return ``common``, or nothing where the user has set one of ``unless``."""
        return {} if any(name in asked for name in self.unless) else self.common


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One choice per role under a name: what ``--plugin`` selects.

    ``defaults`` replaces defaults of the components' options; ``client`` is the module whose
    source becomes the emitted ``client.py``; ``pairs`` are comparisons worth offering by name.
    """

    name: str
    summary: str
    generator: str
    tokenizer: str = "transformers"
    batching: str = "dynamic"
    formatter: str = "text"
    defaults: Mapping[str, Value] = field(default_factory=dict)
    client: str = "llmserve.client.script"
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A Triton backend written in Python, which the embedded server is to have.

    ``folder`` holds its ``model.py`` and whatever else Triton's Python backend needs of it.
    ``stand_in_for`` names a backend of NVIDIA's that this one imitates where the real one is not
    installed, so that servers and benchmarks can say so.
    """

    name: str
    summary: str
    folder: Path
    stand_in_for: str = ""


ROLES: dict[str, type[Component] | type[Recipe] | type[Backend]] = {
    "tokenizer": Tokenizer,
    "generator": Generator,
    "batching": Batching,
    "formatter": Formatter,
    "recipe": Recipe,
    "backend": Backend,
}
"""Every role by its name, in the order in which a request meets them."""
