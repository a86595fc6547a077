"""Triton's sequence batcher in the session stage's configuration: direct slots or oldest first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.builder.context import BuildContext

_CANDIDATES = 4
# An answer that has left is back as the next request after a few times of what requests may wait.
_BACK = 4


def prepare_direct(context: BuildContext) -> Mapping[str, Any]:
    """Give every sequence its own slot of the batch."""
    sequence = _sequence(context)
    # A full batch leaves at once, any other when its oldest request has waited so long.
    sequence.direct.minimum_slot_utilization = 1.0
    sequence.direct.max_queue_delay_microseconds = int(context.options["queue_delay_us"])
    return _settings(context, int(context.options["max_batch_size"]))


def prepare_oldest(context: BuildContext) -> Mapping[str, Any]:
    """Fill batches from all sequences under way."""
    size = int(context.options["max_batch_size"])
    candidates = max(int(context.options["candidates"]) or _CANDIDATES * size, size)
    sequence = _sequence(context)
    sequence.oldest.max_candidate_sequences = candidates
    sequence.oldest.preferred_batch_size.append(size)
    sequence.oldest.max_queue_delay_microseconds = int(context.options["queue_delay_us"])
    return _settings(context, candidates)


def _sequence(context: BuildContext) -> Any:
    sequence = context.config.sequence_batching
    idle = float(context.options["idle_seconds"])
    sequence.max_sequence_idle_microseconds = int(idle * 1_000_000)
    # With direct slots Triton fills those that have no request now, and says so here.
    control = sequence.control_input.add(name="READY").control.add()
    control.kind = pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_READY
    control.int32_false_true.extend([0, 1])
    return sequence


def _settings(context: BuildContext, slots: int) -> Mapping[str, Any]:
    return {
        "slots": slots,
        "idle_seconds": float(context.options["idle_seconds"]),
        "most_tokens": int(context.options["most_tokens"]),
        "wait_seconds": _BACK * int(context.options["queue_delay_us"]) / 1e6,
        "resent": context.options["layout"] == "seed",
    }
