"""What is built: for which version, with which engine, in which way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmserve.plugin import IncompatibleError, Value
from llmserve_trtllm.tables import Row, rows
from llmserve_trtllm.versions import (
    FIRST_CONFIGURABLE,
    FIRST_LLMAPI,
    FIRST_UNBATCHED_V1,
    Version,
)

INFLIGHT = "inflight"
STATIC = "static"
MODEL_TYPES = {INFLIGHT: "inflight_fused_batching", STATIC: "V1"}
NO_EVICT = "guaranteed_no_evict"
ALIAS = "guaranteed_completion"
SCHEDULERS = (NO_EVICT, "max_utilization", ALIAS)

# Other names than the client's, in the models before and behind.
_PREPROCESSING_NAMES = {
    "text_input": "QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
}
_ENGINE_NAMES = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
_LLMAPI_NAMES = {
    "streaming": "stream",
    "sampling_param_stop": "stop_words",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
}

REQUEST = Row("REQUEST", "STRING")
"""Ours: what postprocessing has to know of a request, as JSON."""


def preprocessing_name(client: str) -> str:
    """Return what preprocessing calls a client's tensor."""
    return _PREPROCESSING_NAMES.get(client, client.upper())


def engine_name(client: str) -> str:
    """Return what the engine calls a client's tensor."""
    return _ENGINE_NAMES.get(client, client)


def contract_name(client: str) -> str:
    """Return what llmserve calls a tensor of NVIDIA's model around the LLM API.

    >>> contract_name("sampling_param_max_tokens"), contract_name("text_input")
    ('max_tokens', 'text_input')
    """
    return _LLMAPI_NAMES.get(client, client.removeprefix("sampling_param_"))


@dataclass(frozen=True)
class Target:
    """One build's decisions, which all its models share."""

    version: Version
    options: Mapping[str, Value]
    batching: str
    scheduler: str
    streams: bool
    """Whether the engine's model is decoupled."""

    @property
    def is_first(self) -> bool:
        """Whether it is 0.5.0, whose tensors have other types and wires."""
        return self.version < FIRST_CONFIGURABLE

    @property
    def is_llmapi(self) -> bool:
        return self.options["layout"] == "llmapi"

    @property
    def engine_echoes(self) -> bool:
        """Whether an answer in one piece begins with the prompt; a stream never does."""
        excludes = self.options["exclude_input_in_output"] is True and not self.is_first
        return not self.is_llmapi and not excludes

    @property
    def no_end(self) -> int:
        """The id that no engine ever makes: what ``end_id`` is where nothing ends an answer."""
        return 2**32 - 1 if self.is_first else -1

    def rows(self, *sections: str) -> list[Row]:
        """Return sections of ``tensors.txt`` in this version and layout."""
        found = []
        for section in sections:
            has = _LLMAPI_HAS.get(section) if self.is_llmapi else None
            if section == "client llmapi" and not self.is_llmapi:
                continue
            made = rows(section, self.version, self.options)
            found += [row for row in made if has is None or row.name in has]
        return found

    @property
    def engine_inputs(self) -> list[Row]:
        return self.rows("engine inputs")

    @property
    def engine_outputs(self) -> list[Row]:
        return self.rows("engine outputs", "scores")

    @property
    def direct(self) -> list[Row]:
        """What goes from the client to the engine as it is."""
        has = {row.name for row in self.engine_inputs}
        return [row for row in self.rows("client direct") if row.name in has]

    @property
    def taken(self) -> list[Row]:
        """What preprocessing takes of a client, under the client's names."""
        return self.rows(
            "client text", "client sampling", "client bias", "client llmserve", "client llmapi"
        )


_LLMAPI_HAS: Mapping[str, frozenset[str]] = {
    "engine inputs": frozenset({
        "input_ids", "input_lengths", "request_output_len", "end_id", "pad_id", "stop_words_list",
        "bad_words_list", "temperature", "runtime_top_k", "runtime_top_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "min_length", "min_tokens", "random_seed", "seed",
        "stop", "streaming", "exclude_input_in_output", "len_penalty", "beam_width",
    }),
    "engine outputs": frozenset({"output_ids", "sequence_length"}),
    "scores": frozenset(),
    "client bias": frozenset(),
}  # fmt: skip
"""Of these sections, what the LLM API has a counterpart of."""


def check_batching(name: str) -> str:
    """Refuse a batching strategy that is neither of TensorRT-LLM's."""
    if name not in MODEL_TYPES:
        raise IncompatibleError(
            f"TensorRT-LLM cannot be driven by batching {name!r}",
            mend=f"choose one of {', '.join(MODEL_TYPES)}",
        )
    return name


def scheduler_of(asked: str, report: Callable[[str], None]) -> str:
    """Return the policy that is meant; the tutorials' word for it is taken with a warning."""
    if asked != ALIAS:
        return asked
    report(
        f"warning: no version of TensorRT-LLM has ever known {ALIAS}: the word is taken for "
        f"{NO_EVICT}, which is what those that read it fell back to"
    )
    return NO_EVICT


def engine_batching(batching: str, scheduler: str, version: Version) -> dict[str, str]:
    """Return the parameters of the engine backend, or refuse what the version cannot do."""
    if batching == STATIC and version >= FIRST_UNBATCHED_V1:
        llmapi = " or with --set layout=llmapi for static batches,"
        raise IncompatibleError(
            f"TensorRT-LLM {version} does not run static batches (V1) with an engine: its executor "
            "refuses them",
            mend=f"build with --batching inflight,{llmapi if version >= FIRST_LLMAPI else ''} or "
            "for a version before 0.20",
        )
    return {
        "gpt_model_type": MODEL_TYPES[check_batching(batching)],
        "batch_scheduler_policy": scheduler,
    }


def llmapi_policy(batching: str, scheduler: str) -> str:
    """Return the LLM API's ``capacity_scheduler_policy``."""
    if check_batching(batching) == STATIC:
        if scheduler != NO_EVICT:
            raise IncompatibleError(
                f"static batches have no scheduler {scheduler}",
                mend="leave it out, or build with --batching inflight",
            )
        return "STATIC_BATCH"
    return scheduler.upper()
