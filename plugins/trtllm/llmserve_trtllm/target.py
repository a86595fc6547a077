"""The target of a build: its version, layout and batching, and the resulting tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmserve_trtllm import tensors, versions
from llmserve_trtllm.tensors import Row
from llmserve_trtllm.versions import Version, since

INFLIGHT = "inflight"
STATIC = "static"
MODEL_TYPES = {INFLIGHT: "inflight_fused_batching", STATIC: "V1"}
NO_EVICT = "guaranteed_no_evict"
ALIAS = "guaranteed_completion"
_SAMPLER = "TRTLLMSampler"
_NEEDS_SAMPLER = since("1.1", "1.3")
"""Versions whose default sampler ignores options of a request silently.

TRTLLMSampler is the default of 1.0 (NVIDIA/TensorRT-LLM#6216). In 1.1 and 1.2, TorchSampler is,
unless LLM() gets sampler_type (#6831): it has no penalties (#9442), bad words and seed. 1.3 adds
them (#16485, #16052, #17172) and removes TRTLLMSampler (#18232).
"""
DEFAULT_SIZE = 16
"""How many requests run at once where neither the build nor an engine says it."""
MOST_COPIES = 64
"""The most instances of tensorrt_llm_bls that nobody asked for: each is a process."""


@dataclass(frozen=True)
class BuildTarget:
    """A build's decisions, shared by all its models; it ``streams`` if its engine is decoupled."""

    version: Version
    options: Mapping[str, Any]
    batching: str
    scheduler: str
    streams: bool
    sees: bool = False
    """Whether its model reads images."""

    @property
    def image(self) -> str | None:
        """The image that runs it, if one is known."""
        return versions.container_of(self.version, self.options["container"])

    @property
    def triton(self) -> str:
        """The oldest release of Triton that its image can have; empty if it may be any."""
        if self.image is None:
            return versions.OLDEST_TRITON if self.version > versions.DEFAULT else ""
        named = versions.image_of(self.image)
        return named[1] if named else ""

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
    def has_adapters(self) -> bool:
        """Whether requests can name adapters."""
        return "adapter" in self.engine_names and not self.sees

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
        return int(self.options["max_batch_size"]) or DEFAULT_SIZE

    @property
    def sampler_type(self) -> str:
        """The LLM API's sampler that honours all options of a request; empty is its default."""
        return _SAMPLER if self.version in _NEEDS_SAMPLER else ""

    def rows(self, *tables: Sequence[Row]) -> list[Row]:
        """Return the tensors of tables that exist in this version, layout and kind of build."""
        exists = {
            "": True, "engine": not self.is_llmapi, "llmapi": self.is_llmapi,
            "guided": self.guided, "stream": self.streams, "whole": not self.streams,
            "images": self.sees,
        }  # fmt: skip
        return [
            replace(row, data_type=self.options.get(row.data_type, row.data_type))
            for table in tables
            for row in table
            if self.version in row.versions and exists[row.only]
        ]

    @property
    def engine_names(self) -> frozenset[str]:
        return frozenset(row.name for row in self.rows(tensors.ENGINE_INPUTS))

    @property
    def direct(self) -> list[Row]:
        """The inputs that the client sends to the engine unchanged."""
        return [row for row in self.rows(tensors.CLIENT_DIRECT) if row.name in self.engine_names]

    @property
    def preprocessed(self) -> list[Row]:
        """The client's inputs to preprocessing, by the client's names."""
        return self.rows(
            tensors.CLIENT_TEXT, tensors.CLIENT_SAMPLING, tensors.CLIENT_BIAS,
            tensors.CLIENT_LLMSERVE, tensors.CLIENT_LLMAPI,
        )  # fmt: skip


def resolve_scheduler(scheduler: str, report: Callable[[str], None]) -> str:
    """Return the scheduler policy; the tutorials' name for it is replaced, with a warning."""
    if scheduler != ALIAS:
        return scheduler
    report(
        f"warning: no version of TensorRT-LLM has ever supported {ALIAS}: it is replaced by "
        f"{NO_EVICT}, which versions that read it fell back to"
    )
    return NO_EVICT
