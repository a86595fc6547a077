"""What a model's config says about how to talk to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

Exchange = Literal["unary", "stream", "sequence"]


@dataclass(frozen=True)
class Tensor:
    """An input or output; ``datatype`` is the protocol's name: ``BYTES``, ``INT32``, ``BOOL``."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class ModelState:
    """A line of the server's index: ``state`` is ``READY``, ``LOADING`` or ``UNAVAILABLE``."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True)
class ModelInfo:
    """A model, as far as a client needs to know it.

    ``rows`` is how many prompts fit into one request, None when the model sets no limit.
    ``made_by_llmserve`` holds the version that built it, None for other models.
    ``queue_timeout`` says whether a request can have less time in the queue than others.
    ``parts`` are the models that it is made of, which take no requests of their own.
    """

    name: str
    exchange: Exchange
    batched: bool
    rows: int | None
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    made_by_llmserve: str | None = None
    queue_timeout: bool = False
    parts: tuple[str, ...] = ()


def read_index(answer: Any) -> list[ModelState]:
    return [
        ModelState(entry.name, entry.version, entry.state, entry.reason) for entry in answer.models
    ]


def ready_names(states: Iterable[ModelState]) -> list[str]:
    return sorted({state.name for state in states if state.state == "READY"})


def read_config(config: Any) -> ModelInfo:
    """Read a ``ModelConfig`` message, of a model that llmserve built or of any other."""
    types = config.DESCRIPTOR.fields_by_name["input"].message_type.fields_by_name["data_type"]

    def tensor(entry: Any, optional: bool) -> Tensor:
        kind = types.enum_type.values_by_number[entry.data_type].name.removeprefix("TYPE_")
        datatype = "BYTES" if kind == "STRING" else kind
        return Tensor(entry.name, datatype, tuple(entry.dims), optional)

    inputs = {entry.name: tensor(entry, entry.optional) for entry in config.input}
    version = _parameter(config, "llmserve.version")
    named = _parameter(config, "llmserve.exchange")
    return ModelInfo(
        name=config.name,
        exchange=_exchange(config, named),
        batched=config.max_batch_size > 0,
        rows=_rows(config, inputs.get("text_input")),
        inputs=inputs,
        outputs={entry.name: tensor(entry, False) for entry in config.output},
        made_by_llmserve=version or ("unknown" if named else None),
        queue_timeout=_queue_timeout(config),
        parts=tuple((_parameter(config, "llmserve.parts") or "").split())
        or tuple(step.model_name for step in config.ensemble_scheduling.step),
    )


def _parameter(config: Any, name: str) -> str | None:
    # Asking a protobuf map for a missing key would add it.
    return config.parameters[name].string_value if name in config.parameters else None


def _exchange(config: Any, named: str | None) -> Exchange:
    if named in get_args(Exchange):
        return cast(Exchange, named)
    if config.model_transaction_policy.decoupled:
        return "stream"
    if _has_sequences(config) and not config.sequence_batching.iterative_sequence:
        return "sequence"
    return "unary"


def _queue_timeout(config: Any) -> bool:
    batching = config.dynamic_batching
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    # A request can ask only for less than its queue gives, and where that is 0, for nothing.
    return any(p.allow_timeout_override and p.default_timeout_microseconds for p in policies)


def _has_sequences(config: Any) -> bool:
    return bool(config.WhichOneof("scheduling_choice") == "sequence_batching")


def _rows(config: Any, text: Tensor | None) -> int | None:
    if _has_sequences(config):
        return 1  # Triton's sequence batcher takes requests of one row only.
    if config.max_batch_size > 0:
        return int(config.max_batch_size)
    if text is None or not text.dims:
        return 1
    return None if text.dims[0] < 0 else max(1, text.dims[0])
