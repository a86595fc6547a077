"""What is built: for which version, in which way, and with which tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.plugin import Tensor
from llmserve_trtllm import versions
from llmserve_trtllm.versions import Range, Version, pairs, sections

TENSORS = "tensors.txt"

INFLIGHT = "inflight"
STATIC = "static"
MODEL_TYPES = {INFLIGHT: "inflight_fused_batching", STATIC: "V1"}
NO_EVICT = "guaranteed_no_evict"
ALIAS = "guaranteed_completion"
_ENGINE_SECTIONS = ("engine inputs", "engine outputs", "scores", "client bias")


@dataclass(frozen=True)
class Row(Tensor):
    """A tensor as a template declares it: ``scalar`` where the backend sees no dimension of it."""

    optional: bool = False
    scalar: bool = False

    def __post_init__(self) -> None:
        """Take any type of Triton's, those that Python has none for as well."""


def named(what: str, name: str) -> str:
    """Return what else a tensor is called by ``tensors.txt``, or the same name."""
    return pairs(TENSORS, f"names {what}").get(name, name)


@dataclass(frozen=True)
class Target:
    """One build's decisions, which all its models share; it ``streams`` by a decoupled engine."""

    version: Version
    options: Mapping[str, Any]
    batching: str
    scheduler: str
    streams: bool

    @property
    def is_first(self) -> bool:
        """Whether it is 0.5.0, whose tensors have other types and wires."""
        return self.version < versions.FIRST_CONFIGURABLE

    @property
    def is_llmapi(self) -> bool:
        return bool(self.options["layout"] == "llmapi")

    @property
    def guided(self) -> bool:
        """Whether the engine holds answers to a form."""
        return bool(self.options["guided_decoding_backend"])

    @property
    def engine_echoes(self) -> bool:
        """Whether an answer in one piece begins with the prompt; a stream never does."""
        excludes = self.options["exclude_input_in_output"] is True and not self.is_first
        return not self.is_llmapi and not excludes

    def rows(self, *names: str) -> list[Row]:
        """Return sections of ``tensors.txt`` in this version and layout."""
        found = []
        holds = {
            "a": self.is_llmapi, "d": self.streams, "g": self.guided, "u": not self.streams
        }  # fmt: skip
        for section in names:
            llmapi_lacks = self.is_llmapi and section in _ENGINE_SECTIONS
            for line in sections(TENSORS)[section]:
                name, kind, dims, flags, versions = line.split()
                is_there = self.version in Range.parse(versions)
                is_there &= all(holds.get(flag, True) for flag in flags)
                if not is_there or (llmapi_lacks and "l" not in flags):
                    continue
                # In small letters it is the option that says the type.
                data_type = self.options[kind] if kind.islower() else f"TYPE_{kind}"
                sizes = tuple(map(int, dims.split(",")))
                found.append(Row(name, data_type, sizes, "o" in flags, "r" in flags, "s" in flags))
        return found

    @property
    def engine_names(self) -> frozenset[str]:
        return frozenset(row.name for row in self.rows("engine inputs"))

    @property
    def direct(self) -> list[Row]:
        """What goes from the client to the engine as it is."""
        return [row for row in self.rows("client direct") if row.name in self.engine_names]

    @property
    def taken(self) -> list[Row]:
        """What preprocessing takes of a client, under the client's names."""
        return self.rows(
            "client text", "client sampling", "client bias", "client llmserve", "client llmapi"
        )


def scheduler_of(asked: str, report: Callable[[str], None]) -> str:
    """Return the policy that is meant; the tutorials' word for it is taken with a warning."""
    if asked != ALIAS:
        return asked
    report(
        f"warning: no version of TensorRT-LLM has ever known {ALIAS}: the word is taken for "
        f"{NO_EVICT}, which is what those that read it fell back to"
    )
    return NO_EVICT
