"""Models as a client sees them, read from their configs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from llmserve.contract.options import OPTIONS
from llmserve.contract.passport import DECLARED as FINGERPRINT
from llmserve.contract.passport import PARTS, changed_parts
from llmserve.contract.shared_stream import DECLARED, NUMBER
from llmserve.contract.tasks import GENERATE, PARAMETER
from llmserve.contract.tensors import DECLARED_TEXTS, TEXT_INPUT, TEXT_OUTPUT

Exchange = Literal["unary", "stream", "sequence"]
_OTHER_NAMES = {
    name: tuple(other for other in (row.name, *row.aliases) if other != name)
    for row in OPTIONS.values()
    if row.aliases
    for name in (row.name, *row.aliases)
}


@dataclass(frozen=True)
class TensorInfo:
    """An input or output; ``datatype`` is the protocol's: ``BYTES``, ``INT32``, ``BOOL``."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class ModelState:
    """An entry of the server's index: ``state`` is ``READY``, ``LOADING`` or ``UNAVAILABLE``."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True)
class ModelInfo:
    """What a client needs to know about a model.

    ``rows`` is the maximum number of prompts in one request, None if the model sets no limit.
    ``made_by_llmserve`` is the version that built the model, None for other models.
    ``queue_timeout`` tells whether a request can shorten its time in the queue.
    ``parts`` are the models that it consists of, which accept no requests of their own.
    ``shared_stream`` tells whether the pieces of several answers can arrive together.
    ``task`` is what the model is for: ``generate`` text, ``embed``, ``rerank``, ``classify``, or a
    task of a plugin; "" if it takes no text or returns none.
    The text in and out is ``text_input`` of ``inputs`` and ``text_output`` of ``outputs``; in a
    model that others wrote, the tensor itself may have another name.
    ``fingerprint`` names what its answers depend on, from its weights to its chat template; "" if
    the model has none.
    """

    name: str
    exchange: Exchange
    batched: bool
    rows: int | None
    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]
    made_by_llmserve: str | None = None
    queue_timeout: bool = False
    parts: tuple[str, ...] = ()
    shared_stream: bool = False
    task: str = GENERATE
    fingerprint: str = ""

    @property
    def answer(self) -> str:
        """What the model calls its output with the text."""
        tensor = self.outputs.get(TEXT_OUTPUT.name)
        return TEXT_OUTPUT.name if tensor is None else tensor.name

    def input_of(self, option: str) -> TensorInfo | None:
        """Return the input for an option, by any name of it; None if the model has none."""
        if option in self.inputs or option not in _OTHER_NAMES:
            return self.inputs.get(option)
        return next((self.inputs[n] for n in _OTHER_NAMES[option] if n in self.inputs), None)

    def changed_since(self, fingerprint: str) -> list[str]:
        """Return what of the model is not what it was when it had a fingerprint.

        Of ``weights``, ``tokenizer``, ``chat_template``, ``defaults``, ``settings``, ``engine``;
        all of them if the model has no fingerprint now.
        """
        return changed_parts(fingerprint, self.fingerprint) if self.fingerprint else [*PARTS]


def read_index(response: Any) -> list[ModelState]:
    models = response.models
    return [ModelState(model.name, model.version, model.state, model.reason) for model in models]


def ready_names(states: Iterable[ModelState]) -> list[str]:
    return sorted({state.name for state in states if state.state == "READY"})


def read_config(config: Any) -> ModelInfo:
    """Read the ``ModelConfig`` message of any model, built by llmserve or not."""
    types = config.DESCRIPTOR.fields_by_name["input"].message_type.fields_by_name["data_type"]

    def tensor(entry: Any, optional: bool) -> TensorInfo:
        kind = types.enum_type.values_by_number[entry.data_type].name.removeprefix("TYPE_")
        datatype = "BYTES" if kind == "STRING" else kind
        return TensorInfo(entry.name, datatype, tuple(entry.dims), optional)

    inputs = {entry.name: tensor(entry, entry.optional) for entry in config.input}
    outputs = {entry.name: tensor(entry, False) for entry in config.output}
    _rename(config, TEXT_INPUT.name, inputs)
    _rename(config, TEXT_OUTPUT.name, outputs)
    version = _parameter(config, "llmserve.version")
    exchange = _parameter(config, "llmserve.exchange")
    return ModelInfo(
        name=config.name,
        exchange=_exchange(config, exchange),
        batched=config.max_batch_size > 0,
        rows=_rows(config, inputs.get("text_input")),
        inputs=inputs,
        outputs=outputs,
        made_by_llmserve=version or ("unknown" if exchange else None),
        queue_timeout=_queue_timeout(config),
        parts=tuple((_parameter(config, "llmserve.parts") or "").split())
        or tuple(step.model_name for step in config.ensemble_scheduling.step),
        shared_stream=_parameter(config, DECLARED) == str(NUMBER),
        task=_parameter(config, PARAMETER) or _task(inputs, outputs),
        fingerprint=_parameter(config, FINGERPRINT) or "",
    )


def _rename(config: Any, name: str, tensors: dict[str, TensorInfo]) -> None:
    """Have a tensor that is declared to be the text in or out under the name of that text."""
    declared = _parameter(config, DECLARED_TEXTS[name])
    if declared in tensors:
        tensors[name] = tensors.pop(declared)


def _task(inputs: Mapping[str, TensorInfo], outputs: Mapping[str, TensorInfo]) -> str:
    """Return the task of a model that does not tell it."""
    return GENERATE if TEXT_INPUT.name in inputs and TEXT_OUTPUT.name in outputs else ""


def _parameter(config: Any, name: str) -> str | None:
    # Looking up a missing key in a protobuf map would add it.
    return config.parameters[name].string_value if name in config.parameters else None


def _exchange(config: Any, declared: str | None) -> Exchange:
    if declared in get_args(Exchange):
        return cast(Exchange, declared)
    if config.model_transaction_policy.decoupled:
        return "stream"
    if _has_sequences(config) and not config.sequence_batching.iterative_sequence:
        return "sequence"
    return "unary"


def _queue_timeout(config: Any) -> bool:
    batching = config.dynamic_batching
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    # A request can only shorten the timeout of its queue; if that is 0, it cannot set one.
    return any(p.allow_timeout_override and p.default_timeout_microseconds for p in policies)


def _has_sequences(config: Any) -> bool:
    return bool(config.WhichOneof("scheduling_choice") == "sequence_batching")


def _rows(config: Any, text: TensorInfo | None) -> int | None:
    if _has_sequences(config):
        return 1  # Triton's sequence batcher accepts only requests of one row.
    if config.max_batch_size > 0:
        return int(config.max_batch_size)
    if text is None or not text.dims:
        return 1
    return None if text.dims[0] < 0 else max(1, text.dims[0])
