"""What the plugin puts into a repository, on the machine that builds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.builder.causal import place_causal_model
from llmserve.builder.context import BuildContext
from llmserve.modelconfig import ModelConfig

# A request that is cancelled keeps Triton's place for its sequence until it has been idle for
# long enough (seen on 2.51). So there are many more places than sequences under way.
_CANDIDATES = 65_536


def prepare_generator(context: BuildContext) -> Mapping[str, Any]:
    """Place the weights and say how large the cache is."""
    options = context.options
    return {
        **place_causal_model(context),
        "max_sequences": options["max_batch_size"],
        "cache_tokens": options["cache_tokens"],
        "prefill_chunk": options["prefill_chunk"],
    }


def prepare_iterative(context: BuildContext) -> Mapping[str, Any]:
    """Let Triton schedule each request again and again, with the id of its sequence."""
    config, options = context.config, context.options
    _stream(context)
    batching = config.sequence_batching
    batching.iterative_sequence = True
    direct = options["slots"] == "direct"
    # Too short an idle time ends sequences under way. Direct slots are few, so theirs is short all
    # the same: until it is over, nobody else gets the slot of a client that has gone.
    idle = float(options["idle_seconds"]) or (10.0 if direct else 300.0)
    batching.max_sequence_idle_microseconds = int(idle * 1_000_000)
    if direct:
        batching.direct.SetInParent()
        _take_parameters_only(config)
    else:
        batching.oldest.max_candidate_sequences = max(_CANDIDATES, config.max_batch_size)
    _control(batching, "START", pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_START)
    _control(batching, "CORRID", pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID)
    return {"burst_ms": options["burst_ms"], "idle_seconds": idle}


def _take_parameters_only(config: ModelConfig) -> None:
    """Leave ``text_input`` as the only input; all else comes as request parameters.

    Triton puts requests of direct slots into one batch only if they have as many inputs, where a
    model has optional ones, and counts the controls of those that were scheduled before: a new
    request would wait until all others are done.
    """
    for tensor in reversed([tensor for tensor in config.input if tensor.name != "text_input"]):
        config.input.remove(tensor)
    config.input[0].optional = False


def _stream(context: BuildContext) -> None:
    context.config.model_transaction_policy.decoupled = True
    context.exchange = "stream"


def _control(batching: ModelConfig, name: str, kind: int) -> None:
    control = batching.control_input.add(name=name).control.add(kind=kind)
    if kind == pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID:
        control.data_type = pb.DataType.TYPE_UINT64
    else:
        control.bool_false_true.extend([False, True])
