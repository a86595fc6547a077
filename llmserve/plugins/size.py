"""How large a model is, and what a generator says that it takes: before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmserve.hardware import computes_in, has_gpu
from llmserve.plugins.options import Value
from llmserve.plugins.quantised import Quantised

if TYPE_CHECKING:
    from llmserve.runtime.lora import Lora

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The size of a number of each type that weights are loaded in."""


@dataclass(frozen=True)
class PackedSize:
    """The quantised weights of a checkpoint: how they are stored, and how large they are."""

    quantised: Quantised
    parameters: int
    """How many numbers they stand for."""
    bytes: int
    """What they take in its files, with their scales and zero points."""

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> PackedSize:
        """Return what JSON has given."""
        quantised = {**content["quantised"], "block": tuple(content["quantised"]["block"])}
        return cls(Quantised(**quantised), content["parameters"], content["bytes"])


@dataclass(frozen=True)
class AdapterSize:
    """How large an adapter is: of each product that it adds to, it has two matrices of its rank."""

    rank: int
    edges: int
    """How many inputs and outputs those products have, all together."""
    products: int
    """How many products those are."""

    @property
    def parameters(self) -> int:
        """How many numbers its matrices have."""
        return self.rank * self.edges

    @classmethod
    def of(cls, lora: Lora) -> AdapterSize:
        """Return how large an adapter on the disk is."""
        return cls(lora.rank, sum(map(sum, lora.shapes.values())), len(lora.shapes))


@dataclass(frozen=True)
class ModelSize:
    """The facts of a checkpoint that decide what it takes, from its headers and configuration.

    It is in the manifest of a model, and the same on all machines.
    """

    parameters: int
    """How many numbers its weights have; what is tied counts once."""
    bytes: int
    """What its files of weights take."""
    dtype: str
    """The type that most of the weights are stored in that are not quantised."""
    ends: int = 0
    """How many of the parameters are the table of tokens and the product of the scores."""
    largest: int = 0
    """How many of them the largest weight has; 0 if not known."""
    layers: int = 0
    """How many layers it has, alike or nearly so; 0 if not known."""
    cache: int = 0
    """How many numbers are kept of a token, in all layers: keys and values, or the latent that
    they are made from (DeepSeek); 0 if not known."""
    context: int = 0
    """The most tokens of a prompt with its answer; 0 if not known."""
    window: int = 0
    """How many tokens back some of its layers look at most; 0 if all look at the whole context."""
    windowed: int = 0
    """How many of the numbers of ``cache`` are of such layers."""
    unstretched: int = 0
    """Up to how many tokens longrope rotates them one way; 0 without it."""
    state: int = 0
    """How many bytes the states of a sequence take at most, in all layers that keep one whose size
    does not grow; 0 if none does, or if it is not known."""
    is_on_hub: bool = False
    """Whether its files are in the hub's cache, and not in a folder of the user's."""
    is_checkpoint: bool = True
    """Whether its weights are as transformers saves them, and not in an engine's own form."""
    is_gguf: bool = False
    """Whether they are in a GGUF file. A generator that does not keep them has them converted to a
    checkpoint of 16 bits before anything else."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """How many of the parameters in such a file have which type, such as ``Q4_K``."""

    of_heads: int | None = None
    """How many numbers the keys and values of a token are where ``cache`` is of their latent."""
    capped: int | None = None
    """How many of the numbers of ``cache`` one layer has, of a model whose layers cap their
    attention scores."""
    packed: PackedSize | None = None
    """Those of its parameters that are quantised, in a checkpoint that is."""
    draft: ModelSize | None = None
    """Of the smaller model that guesses for it, if there is one."""
    adapters: tuple[AdapterSize, ...] = ()
    """Its adapters; not in a manifest, since they come and go."""

    def bytes_with(self, width: int) -> int:
        """Return what its weights take if those that are not quantised have so many bytes each."""
        if self.packed is None:
            return width * self.parameters
        return self.packed.bytes + width * (self.parameters - self.packed.parameters)

    def content(self) -> dict[str, Any]:
        content = asdict(self)
        del content["adapters"]
        if self.draft:
            content["draft"] = self.draft.content()
        return {key: value for key, value in content.items() if value is not None}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> ModelSize:
        """Return what ``content`` has given."""
        draft, packed = content.get("draft"), content.get("packed")
        return cls(
            **{
                **content,
                "draft": cls.read(draft) if draft else None,
                "packed": PackedSize.read(packed) if packed else None,
            }
        )


@dataclass(frozen=True)
class Needs:
    """Bytes that a model takes, where it is built and where it is served.

    ``build`` is the most memory of the build's processes, and ``disk`` what the build writes.
    Served, it takes ``process`` whatever its size, ``weights``, and the ``cache`` without which it
    could not answer all that it says it does; ``cached`` says what that holds. ``adapters`` are
    those that it has, when requests name all of them. With ``on_gpu``, weights, cache and adapters
    are there, with ``on_all_gpus`` on all together. Each of several ``instances`` takes all of it.

    ``reads`` and ``mapped`` are files that a build and a served model have in their address space:
    the system may take back the memory of these at any time, and read them again.

    ``instead`` are changes of options that make it smaller, the one that costs least first.
    """

    build: int = 0
    disk: int = 0
    process: int = 0
    weights: int = 0
    cache: int = 0
    adapters: int = 0
    reads: int = 0
    mapped: int = 0
    instances: int = 1
    on_gpu: bool = False
    on_all_gpus: bool = False
    cached: str = ""
    instead: tuple[Mapping[str, Value], ...] = ()

    @property
    def served(self) -> int:
        """What it takes of this machine's memory in use."""
        here = 0 if self.on_gpu else self._of_device
        return self.instances * (self.process + here)

    @property
    def of_gpu(self) -> int:
        """What it takes of a GPU."""
        return self.instances * self._of_device if self.on_gpu else 0

    @property
    def _of_device(self) -> int:
        return self.weights + self.cache + self.adapters


@dataclass(frozen=True)
class Cached:
    """What is kept of sequences: keys and values, and a state of each with copies if it has any.

    ``copies`` is how many bytes these may take.
    """

    size: ModelSize
    tokens: int = 0
    sequences: int = 1
    copies: int = 0

    @property
    def states(self) -> int:
        """How many bytes the states take, with the copies that fit."""
        if not (state := self.size.state):
            return 0
        return (self.sequences + self.copies // state) * state

    def __str__(self) -> str:
        parts = [f"a cache of {self.tokens} tokens"] if self.size.cache and self.tokens else []
        if self.size.state:
            many = f"states of {self.sequences} sequences with copies"
            parts.append(many if self.sequences > 1 or self.copies else "the state of a sequence")
        return " and ".join(parts)


def needs_with_draft(
    needs: Callable[[ModelSize, Mapping[str, Value]], Needs],
    size: ModelSize,
    options: Mapping[str, Value],
) -> Needs:
    """Return what a model takes together with its draft model, which is built after it."""
    found = needs(size, options)
    if size.draft is None:
        return found
    draft = needs(size.draft, options)
    return replace(
        found,
        build=max(found.build, draft.build),
        disk=found.disk + draft.disk,
        weights=found.weights + draft.weights,
        cache=found.cache + draft.cache,
        reads=max(found.reads, draft.reads),
        mapped=found.mapped + draft.mapped,
    )


def loaded_type(size: ModelSize, asked: str, *, on_gpu: bool) -> str:
    """Return the type that weights have in memory on this machine, as ``DTYPE_OPTION`` says."""
    if asked != "auto":
        return asked
    if on_gpu:
        return size.dtype
    return "bfloat16" if size.dtype in _HALF and computes_in("bfloat16") else "float32"


_HALF = ("bfloat16", "float16")


def is_for_gpu(device: str) -> bool:
    """Return whether a model with this option ``device`` is on a GPU here."""
    return device != "cpu" and (device != "auto" or has_gpu())
