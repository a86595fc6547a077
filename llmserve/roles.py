"""The roles a plugin can fill: frozen dataclasses that name their runtime by an import string.

In Triton, the class that ``runtime`` names does the work; nothing imports it before that, so
listing plugins loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmserve.errors import PluginError
from llmserve.options import Option, Value
from llmserve.runtime import contract
from llmserve.runtime.contract import Tensor
from llmserve.tools import ToolReader

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext
    from llmserve.builder.ensemble import Assembly

Prepare = Callable[["BuildContext"], Mapping[str, Any]]
"""Writes what the runtime class needs, and returns the settings it is made with (JSON)."""
Assemble = Callable[["Assembly"], None]


@dataclass(frozen=True, kw_only=True)
class Role:
    """What is registered: ``name`` selects it, ``summary`` says in one line what it does."""

    name: str
    summary: str

    def __post_init__(self) -> None:
        """Refuse what is not a tuple: of one element, the comma is easily left out."""
        for field_name, kind in _ELEMENTS.items():
            given = getattr(self, field_name, None)
            alike = isinstance(given, (tuple, list)) and all(isinstance(one, kind) for one in given)
            if given is not None and not alike:
                problem = f"{field_name} of {self.name!r} is {given!r}"
                raise PluginError(problem, mend=f"give a tuple of {kind.__name__}, as in (one,)")


@dataclass(frozen=True, kw_only=True)
class Component(Role):
    """What the roles share that run in Triton.

    ``runtime`` is ``"package.module:Class"``, made in Triton as ``Class(settings, folder)``
    with the settings that ``prepare`` returned and the version folder it wrote to. ``inputs`` are
    the tensors it reads, ``requires`` the distributions that it imports, by default those that
    the plugin's own depends on.
    """

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

    ``modes`` says how it can be driven, in the words of ``Batching.mode``. One that runs in a
    backend other than Python's has ``assemble``, which adds the models of an ensemble.
    ``source`` says what ``--model`` has to name: ``"huggingface"`` a model as ``save_pretrained``
    writes it, in a folder or on the hub; ``"folder"`` any local folder; None whatever the engine
    makes of it. A model has a file that fits one of the patterns in ``weights``. ``outputs`` are
    tensors that only this generator can fill. One that ``constrains`` asks
    ``Generation.constrain`` before it chooses a token, so that a formatter can hold answers to
    a form.
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
    edits ``context.config``, and calls ``context.streams()`` where answers leave in pieces.
    """

    mode: str = "batch"
    inputs: tuple[Tensor, ...] = (
        contract.MAX_TOKENS,
        contract.STREAM,
        contract.STOP_WORDS,
        contract.INCLUDE_STOP,
        contract.INPUT_IDS,
        contract.PROMPT_ONLY,
    )


@dataclass(frozen=True, kw_only=True)
class Formatter(Component):
    """Answers to response tensors. Runtime: :class:`llmserve.runtime.Formatter`.

    It has the tensors of the contract, and with ``extra_inputs`` and ``extra_outputs`` its own:
    among them the options of a runtime class that can ``constrain`` answers. ``constrains_with``
    are distributions that this takes, which are wanted in Triton where they are installed here.
    """

    inputs: tuple[Tensor, ...] = contract.TEXT_FORMAT_INPUTS
    outputs: tuple[Tensor, ...] = contract.TEXT_FORMAT_OUTPUTS
    constrains_with: tuple[str, ...] = ()
    extra_inputs: InitVar[tuple[Tensor, ...]] = ()
    extra_outputs: InitVar[tuple[Tensor, ...]] = ()

    def __post_init__(self, extra_inputs: Any, extra_outputs: Any) -> None:
        object.__setattr__(self, "inputs", (*self.inputs, *extra_inputs))
        object.__setattr__(self, "outputs", (*self.outputs, *extra_outputs))
        super().__post_init__()


@dataclass(frozen=True)
class Pair:
    """Two builds worth comparing: ``compare --pair`` measures ``second`` against ``first``.

    Both are written ``label=recipe:option=value``. ``common`` are options of both, used where a
    recipe has them and the user has set none of ``unless``.
    """

    name: str
    first: str
    second: str
    common: Mapping[str, str] = field(default_factory=dict)
    unless: tuple[str, ...] = ()

    def defaults(self, asked: Mapping[str, str]) -> Mapping[str, str]:
        return {} if any(name in asked for name in self.unless) else self.common


@dataclass(frozen=True, kw_only=True)
class Recipe(Role):
    """One choice per role under a name: what ``--plugin`` selects.

    ``defaults`` replaces defaults of the components' options; ``client`` is the module whose
    source becomes the emitted ``client.py``; ``pairs`` are comparisons worth offering by name.
    ``suits`` ranks it for who names no recipe: for ``"cpu"`` and ``"cuda"``, the highest is taken.
    """

    generator: str
    tokenizer: str = "transformers"
    batching: str = "dynamic"
    formatter: str = "text"
    defaults: Mapping[str, Value] = field(default_factory=dict)
    client: str = "llmserve.client.script"
    pairs: tuple[Pair, ...] = ()
    suits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Backend(Role):
    """A Triton backend written in Python, which the embedded server is to have.

    ``folder`` holds its ``model.py`` and what that needs. ``stand_in_for`` names the backend of
    NVIDIA's that it imitates where that is not installed, so that servers and benchmarks say so.
    """

    folder: Path
    stand_in_for: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name in ("python", "ensemble"):
            raise PluginError(f"Triton has a backend {self.name!r}", mend="give it another name")


@dataclass(frozen=True)
class Place:
    """Where a frontend listens, and what it stands before.

    ``url`` is Triton's gRPC address, ``metrics`` the URL of its own metrics. ``replicas`` are the
    gRPC addresses of other Tritons that serve the same, ``replica_metrics`` the URLs of their
    metrics. ``status`` is the socket at which ``serve`` tells the state of each model. Without
    ``keys``, a file, a frontend lets in only this machine, unless ``open``. ``collector`` is the
    address that takes spans, as OpenTelemetry's OTLP over HTTP.
    """

    url: str
    host: str
    port: int
    grace: float
    metrics: str = ""
    models: tuple[str, ...] = ()
    keys: Path | None = None
    open: bool = False
    status: Path | None = None
    collector: str = ""
    replicas: tuple[str, ...] = ()
    replica_metrics: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Frontend(Role):
    """What listens before Triton and speaks another protocol: a process that ``serve`` starts.

    ``command`` returns the words that start it, after Python's own, or refuses the place. The
    process listens on the place's port, and on SIGTERM finishes what is under way within its
    grace. ``path`` is what the address ends with that is shown to people.
    """

    command: Callable[[Place], Sequence[str]]
    port: int = 8080
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class ToolParser(Role):
    """How a family of models writes that it calls tools; a frontend reads their answers with it.

    ``reader`` makes what reads one answer, of the names of the tools that may be called. ``suits``
    says of the text of a chat template how well it fits: not at all is 0, the highest is taken.
    """

    reader: Callable[[frozenset[str]], ToolReader]
    suits: Callable[[str], int]


ROLES: dict[str, type[Role]] = {
    "tokenizer": Tokenizer,
    "generator": Generator,
    "batching": Batching,
    "formatter": Formatter,
    "recipe": Recipe,
    "backend": Backend,
    "frontend": Frontend,
    "tool_parser": ToolParser,
}
"""Every role by its name, in the order in which a request meets them."""

_ELEMENTS: Mapping[str, type] = {
    "options": Option,
    "inputs": Tensor,
    "outputs": Tensor,
    "requires": str,
    "weights": str,
    "pairs": Pair,
}
"""The fields that hold several things, and of which type these are."""
