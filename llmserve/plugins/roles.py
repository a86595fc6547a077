"""The roles that a plugin can fill: frozen dataclasses that refer to their runtime class by name.

The class that ``runtime`` names does the work in Triton. It is imported only there, so listing
plugins does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmserve.client.tools.parts import ToolReader
from llmserve.contract.address import Address
from llmserve.contract.names import public_runtime
from llmserve.contract.options import ANSWER, TEXT_FORMAT_INPUTS
from llmserve.contract.serve_options import PLACED
from llmserve.contract.tasks import GENERATE, TOKENS
from llmserve.contract.tensors import TEXT_FORMAT_OUTPUTS, Tensor
from llmserve.errors import PluginError
from llmserve.plugins.options import Option, Value
from llmserve.plugins.quantised import Quantised, Treatment, by_transformers
from llmserve.plugins.size import ModelSize, Needs

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext
    from llmserve.builder.ensemble import Assembly

Prepare = Callable[["BuildContext"], Mapping[str, Any]]
"""Writes the runtime class's files and returns its settings (JSON)."""
Assemble = Callable[["Assembly"], None]
Accept = Callable[["BuildContext"], None]
Need = Callable[[ModelSize, Mapping[str, Value]], Needs]
"""Returns what a model of a size takes with the options of a build."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """Base of everything that plugins register: ``name`` selects it, ``summary`` is one line."""

    name: str
    summary: str

    def __post_init__(self) -> None:
        """Refuse fields that are not tuples: ``(x)`` without its comma is an easy mistake."""
        for field_name, kind in _ELEMENTS.items():
            value = getattr(self, field_name, None)
            valid = isinstance(value, (tuple, list)) and all(isinstance(v, kind) for v in value)
            if value is not None and not valid:
                problem = f"{field_name} of {self.name!r} is {value!r}"
                raise PluginError(problem, hint=f"give a tuple of {kind.__name__}, as in (item,)")


@dataclass(frozen=True, kw_only=True)
class Component(Role):
    """Base of the roles that run in Triton.

    ``runtime`` is ``"package.module:Class"``, constructed in Triton as ``Class(settings, folder)``
    with the settings that ``prepare`` returned and the version folder that it wrote to. ``inputs``
    are the tensors that the class reads, ``requires`` the distributions that it imports; the
    default is the dependencies of the plugin's distribution.
    """

    runtime: str
    prepare: Prepare | None = None
    options: tuple[Option, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    requires: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "runtime", public_runtime(self.runtime))


@dataclass(frozen=True, kw_only=True)
class Tokenizer(Component):
    """Converts text to ids and back. Runtime: :class:`llmserve.runtime.Tokenizer`."""


@dataclass(frozen=True, kw_only=True)
class Generator(Component):
    """Computes the answer to ids. Runtime: :class:`llmserve.runtime.Generator`.

    ``modes`` are the values of ``Batching.mode`` that it supports. A generator that runs in
    another backend than Python's has ``assemble``, which adds the models of an ensemble; one that
    calls another model adds that in ``prepare``.
    ``source`` defines what ``--model`` must name: ``"huggingface"`` a model as ``save_pretrained``
    writes it, in a folder or on the hub; ``"folder"`` any local folder; ``"file"`` a local file;
    None anything, which the engine interprets. A folder has a file that matches one of the patterns
    in ``weights``; a file matches one itself.
    ``architectures`` are ends of the names of models' classes, such as ``ForTokenClassification``:
    a build that refuses such a model names the recipes with this generator.
    ``needs`` says how much memory and disk a model takes, from its size and the options of the
    build: what does not fit is then refused before anything is loaded.
    ``accepts`` raises an ``UnservedError`` for a model that it cannot compute, which it finds out
    from the configuration: a build that refuses a model names the plugin that accepts it.
    ``keeps_gguf`` says whether, with these options, it reads the weights of a GGUF file itself,
    where ``llmserve.plugin.KeptWeights`` finds them; otherwise they are widened for it.
    ``quantised`` says whether it computes a checkpoint whose weights are quantised in such a way,
    and whether they stay in their bits (``"kept"``) or take 16 each (``"widened"``); a build
    refuses others (``""``), and names the plugins that do. Without it, those are computed that
    transformers loads with the packages that are installed.
    ``outputs`` are tensors that only this generator can fill. A generator that ``constrains``
    calls ``Generation.constrain`` before it chooses a token, so that formatters can constrain
    answers. ``answers`` is what it answers with: ``"tokens"``, or a value for each prompt, such as
    a ``"vector"``; the formatter has to be for the same.
    """

    modes: frozenset[str] = frozenset({"batch"})
    source: Literal["huggingface", "folder", "file"] | None = "huggingface"
    weights: tuple[str, ...] = ("*.safetensors",)
    assemble: Assemble | None = None
    outputs: tuple[Tensor, ...] = ()
    constrains: bool = False
    answers: str = TOKENS
    architectures: tuple[str, ...] = ()
    needs: Need | None = None
    accepts: Accept | None = None
    keeps_gguf: Callable[[Mapping[str, Value]], bool] = lambda _: False
    quantised: Callable[[Quantised], Treatment] = by_transformers


@dataclass(frozen=True, kw_only=True)
class Batching(Component):
    """Decides how requests share the machine. Runtime: :class:`llmserve.runtime.Driver`.

    ``mode`` is what the generator must support: ``"batch"`` passes it whole batches. ``prepare``
    edits ``context.config``, and calls ``context.streams()`` if answers are sent in pieces.
    """

    mode: str = "batch"
    inputs: tuple[Tensor, ...] = ANSWER


@dataclass(frozen=True, kw_only=True)
class Formatter(Component):
    """Turns answers into response tensors. Runtime: :class:`llmserve.runtime.Formatter`.

    ``extra_inputs`` and ``extra_outputs`` add to the tensors of the contract; a runtime class that
    can ``constrain`` answers declares its options there. ``constrains_with`` are distributions
    needed for that; the model requires those of them that are installed where it is built.
    ``answers`` is what it formats, as in :class:`Generator`. ``task`` is what its models are for,
    which clients and frontends read.
    """

    inputs: tuple[Tensor, ...] = TEXT_FORMAT_INPUTS
    outputs: tuple[Tensor, ...] = TEXT_FORMAT_OUTPUTS
    constrains_with: tuple[str, ...] = ()
    answers: str = TOKENS
    task: str = GENERATE
    extra_inputs: InitVar[tuple[Tensor, ...]] = ()
    extra_outputs: InitVar[tuple[Tensor, ...]] = ()

    def __post_init__(self, extra_inputs: Any, extra_outputs: Any) -> None:
        object.__setattr__(self, "inputs", (*self.inputs, *extra_inputs))
        object.__setattr__(self, "outputs", (*self.outputs, *extra_outputs))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Recipe(Role):
    """One component per role, under a name that ``--plugin`` selects.

    ``defaults`` replaces defaults of the components' options; ``client`` is the module whose
    source becomes the emitted ``client.py``. ``suits`` ranks the recipe for builds without
    ``--plugin``: for ``"cpu"`` and ``"cuda"``, the recipe with the highest number is used.
    """

    generator: str
    tokenizer: str = "transformers"
    batching: str = "dynamic"
    formatter: str = "text"
    defaults: Mapping[str, Value] = field(default_factory=dict)
    client: str = "llmserve.client.script"
    suits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Backend(Role):
    """A Triton backend written in Python, which is installed in the embedded server.

    ``folder`` contains its ``model.py`` and the files that it needs. ``stand_in_for`` names the
    NVIDIA backend that it imitates where that is not installed; servers and benchmarks report it.
    """

    folder: Path
    stand_in_for: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name in ("python", "ensemble"):
            raise PluginError(f"Triton has a backend {self.name!r}", hint="give it another name")


@dataclass(frozen=True)
class Place:
    """Where a frontend listens, and which Tritons it forwards to.

    All ``tritons`` serve the same models. ``url`` is the gRPC address of the first. ``status``
    is the socket at which ``serve`` reports the state of each model. If they are loaded
    ``on_demand``, the frontend holds a model there while it uses it (``llmserve.server.Holds``).
    Without the file ``keys``, a frontend accepts connections only from this machine, unless
    ``open``. ``collector`` is the address that accepts spans, as OpenTelemetry's OTLP over HTTP.
    ``batches`` is the folder in which a frontend may keep files that clients upload, ``responses``
    the one for responses that requests may go on from, and ``adapter_folder`` the one from which
    clients may have adapters added to models. ``image_hosts`` are those whose addresses of images
    it opens for users, and no others. ``aliases`` are other names of models, each as
    ``NAME=MODEL``. ``warm_scope`` is ``key`` if a request may find only what is kept of the prompts
    of its own key. ``shadows`` and ``canaries`` are new builds that a frontend tries, each as
    ``NAME=NEW`` or ``NAME=NEW:SHARE``, ``release_tolerances`` how much worse they may be, and
    ``keep_texts`` for how many hours texts of users are kept to compare. ``release_file`` is where
    it is kept what is known of the builds. ``certify_share`` is the share of answers that are
    handed to ``serve`` at ``status``, to be judged by their models. With ``inspect`` a frontend
    shows the last requests with their texts, to who may see them.
    """

    tritons: tuple[Address, ...]
    host: str
    port: int
    grace: float
    models: tuple[str, ...] = ()
    keys: Path | None = None
    open: bool = False
    status: Path | None = None
    collector: str = ""
    batches: Path | None = None
    responses: Path | None = None
    adapter_folder: Path | None = None
    on_demand: bool = False
    aliases: tuple[str, ...] = ()
    warm_scope: str = ""
    shadows: tuple[str, ...] = ()
    canaries: tuple[str, ...] = ()
    release_tolerances: tuple[str, ...] = ()
    keep_texts: float | None = None
    release_file: Path | None = None
    certify_share: float | None = None
    image_hosts: tuple[str, ...] = ()
    inspect: bool = False

    @property
    def url(self) -> str:
        return self.tritons[0].grpc

    def arguments(self) -> list[str]:
        """Return what ``serve`` was told, as its own options: for a command that has them too.

        They are without its addresses: ``host``, ``port``, ``tritons`` and ``status``.
        """
        words = [word for name in self.models for word in ("--model", name)]
        for row in PLACED:
            value, flag = getattr(self, row.place), row.flags[0]
            if row.kind == "flag":
                words += [flag] if value else []
            elif row.kind == "texts":
                words += [word for each in value for word in (flag, each)]
            elif value is not None and value != "":
                words += [flag, str(value)]
        return words


@dataclass(frozen=True, kw_only=True)
class Frontend(Role):
    """A process in front of Triton that speaks another protocol and that ``serve`` starts.

    ``command`` returns the arguments of the Python interpreter that runs it, or refuses the place.
    The process listens on the place's port, and on SIGTERM finishes requests in flight within its
    grace period. ``scheme`` and ``path`` are those of the address that is shown to users.
    ``page`` is the path of a page for people, if there is one.
    ``health`` is the path of an HTTP request that it always answers at once: ``serve`` restarts one
    that does not. A ``default`` frontend is started by every ``serve``, any other only if
    ``--frontend`` names it.
    """

    command: Callable[[Place], Sequence[str]]
    port: int = 8080
    path: str = ""
    scheme: str = "http"
    health: str = ""
    default: bool = False
    page: str = ""

    def arguments(self, place: Place) -> list[str]:
        """Return the interpreter's arguments, checked."""
        arguments = self.command(place)
        valid = isinstance(arguments, (list, tuple)) and all(
            isinstance(argument, (str, PathLike)) for argument in arguments
        )
        if not valid:
            raise PluginError(
                f"command of frontend {self.name!r} returned {arguments!r}",
                hint='return a list of arguments, as in ["-m", "acme_frontend", str(place.port)]',
            )
        return [str(argument) for argument in arguments]


@dataclass(frozen=True, kw_only=True)
class ToolParser(Role):
    """How a model family writes tool calls or its thinking, with which frontends parse answers.

    ``reader`` returns a reader for one answer, given the names of the tools that may be called.
    ``suits`` rates how well the parser fits the text of a chat template, from 0 (not at all); the
    highest is used, one for calls and one for thinking. A parser without ``calls`` finds thinking
    alone, and what it finds to be text goes on to the other one; if the best parser for calls finds
    both, it is used alone.

    ``thinking`` makes it a parser of thinking: the texts that begin and end it, and what closes it
    early if that is more than its end. A model whose every answer has an end, but no beginning, has
    an empty one. ``opens`` are texts of which one begins each call; with ``json_calls`` they are
    followed by an object with ``name`` and ``arguments``, or by a list of these.
    """

    reader: Callable[[frozenset[str]], ToolReader]
    suits: Callable[[str], int]
    calls: bool = True
    thinking: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    json_calls: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.thinking) not in (0, 2, 3) or (self.thinking and not self.thinking[1]):
            problem = f"thinking of {self.name!r} is {self.thinking!r}"
            raise PluginError(problem, hint='give its marks, as in ("<think>", "</think>")')
        if not (self.calls or self.thinking):
            raise PluginError(f"{self.name!r} finds nothing", hint="give its marks in thinking")


MODEL_ROLES: Mapping[str, type[Component]] = {
    "tokenizer": Tokenizer,
    "generator": Generator,
    "batching": Batching,
    "formatter": Formatter,
}
"""The roles that make up a model, in the order in which a request passes through them."""

ROLES: Mapping[str, type[Role]] = {
    **MODEL_ROLES,
    "recipe": Recipe,
    "backend": Backend,
    "frontend": Frontend,
    "tool_parser": ToolParser,
}
"""Every role by its name."""

_ELEMENTS: Mapping[str, type] = {
    "options": Option,
    "inputs": Tensor,
    "outputs": Tensor,
    "requires": str,
    "weights": str,
    "thinking": str,
    "opens": str,
}
"""The tuple fields of roles, with the type of their elements."""
