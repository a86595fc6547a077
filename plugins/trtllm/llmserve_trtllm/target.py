"""The target of a build: its version, layout and batching, and the resulting tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.plugin import Tensor
from llmserve_trtllm import versions
from llmserve_trtllm.versions import Range, Version, columns, pairs, sections

TENSORS = "tensors.txt"

INFLIGHT = "inflight"
STATIC = "static"
MODEL_TYPES = {INFLIGHT: "inflight_fused_batching", STATIC: "V1"}
NO_EVICT = "guaranteed_no_evict"
ALIAS = "guaranteed_completion"
_SAMPLER = "TRTLLMSampler"
_UNBATCHED_SIZE = 16
_ENGINE_SECTIONS = ("engine inputs", "engine outputs", "scores", "client bias")


@dataclass(frozen=True)
class Row(Tensor):
    """A tensor as a template declares it; the backend sees only the batch dimension of a scalar."""

    optional: bool = False
    scalar: bool = False

    def __post_init__(self) -> None:
        """Accept every Triton type, unlike ``Tensor``, which accepts only types that Python has."""


def mapped_name(mapping: str, name: str) -> str:
    """Return a tensor's other name by a mapping in ``tensors.txt``, or the same name."""
    return pairs(TENSORS, f"names {mapping}").get(name, name)


@dataclass(frozen=True)
class Target:
    """A build's decisions, shared by all its models; it ``streams`` if its engine is decoupled."""

    version: Version
    options: Mapping[str, Any]
    batching: str
    scheduler: str
    streams: bool

    @property
    def is_0_5(self) -> bool:
        """Whether the version is 0.5.0, whose tensors have other types and connections."""
        return self.version < versions.FIRST_CONFIGURABLE

    @property
    def is_llmapi(self) -> bool:
        return bool(self.options["layout"] == "llmapi")

    @property
    def guided(self) -> bool:
        """Whether the engine can constrain answers."""
        return bool(self.options["guided_decoding_backend"])

    @property
    def engine_echoes(self) -> bool:
        """Whether an unstreamed answer begins with the prompt; a stream never does."""
        excludes = self.options["exclude_input_in_output"] is True and not self.is_0_5
        return not self.is_llmapi and not excludes

    @property
    def is_batched(self) -> bool:
        """Whether clients send a batch dimension."""
        return bool(self.options["max_batch_size"])

    @property
    def batch_size(self) -> int:
        """How many requests the engine runs at once."""
        return int(self.options["max_batch_size"]) or _UNBATCHED_SIZE

    @property
    def sampler_type(self) -> str:
        """The LLM API's sampler that honours all options of a request; empty is its default."""
        options = columns("options.txt", "llm api options")
        honoured = (Range.parse_all(default) for _, default, _ in options)
        is_complete = all(any(self.version in r for r in ranges) for ranges in honoured)
        return "" if is_complete else _SAMPLER

    def rows(self, *names: str) -> list[Row]:
        """Return the tensors of sections of ``tensors.txt`` in this version and layout."""
        rows = []
        conditions = {
            "a": self.is_llmapi, "d": self.streams, "g": self.guided, "u": not self.streams
        }  # fmt: skip
        for section in names:
            llmapi_lacks = self.is_llmapi and section in _ENGINE_SECTIONS
            for line in sections(TENSORS)[section]:
                name, kind, dims, flags, versions = line.split()
                exists = self.version in Range.parse(versions)
                exists &= all(conditions.get(flag, True) for flag in flags)
                if not exists or (llmapi_lacks and "l" not in flags):
                    continue
                # A type in lower case is the name of the option that holds the type.
                data_type = self.options[kind] if kind.islower() else f"TYPE_{kind}"
                sizes = tuple(map(int, dims.split(",")))
                rows.append(Row(name, data_type, sizes, "o" in flags, "r" in flags, "s" in flags))
        return rows

    @property
    def engine_names(self) -> frozenset[str]:
        return frozenset(row.name for row in self.rows("engine inputs"))

    @property
    def direct(self) -> list[Row]:
        """The inputs that the client sends to the engine unchanged."""
        return [row for row in self.rows("client direct") if row.name in self.engine_names]

    @property
    def preprocessed(self) -> list[Row]:
        """The client's inputs to preprocessing, by the client's names."""
        return self.rows(
            "client text", "client sampling", "client bias", "client llmserve", "client llmapi"
        )


def resolve_scheduler(scheduler: str, report: Callable[[str], None]) -> str:
    """Return the scheduler policy; the tutorials' name for it is replaced, with a warning."""
    if scheduler != ALIAS:
        return scheduler
    report(
        f"warning: no version of TensorRT-LLM has ever supported {ALIAS}: it is replaced by "
        f"{NO_EVICT}, which versions that read it fell back to"
    )
    return NO_EVICT
