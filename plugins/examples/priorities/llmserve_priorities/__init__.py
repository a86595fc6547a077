"""The plugin ``priorities``: who waits longer in Triton's dynamic batcher, and who not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.plugin import DECOUPLED_OPTION, Batching, BuildContext, Option, hookimpl

# Triton keeps a queue for every level, so many of them only cost.
_MOST_LEVELS = 100

OPTIONS = (
    Option("max_batch_size", 8, "Most prompts in one batch.", minimum=1),
    DECOUPLED_OPTION,
    Option(
        "priority_levels",
        3,
        "How many priorities there are; 1 goes first.",
        minimum=1,
        maximum=_MOST_LEVELS,
    ),
    Option(
        "default_priority",
        2,
        "Priority of a request that names none.",
        minimum=1,
        maximum=_MOST_LEVELS,
    ),
    Option(
        "queue_size",
        0,
        "Most requests that wait in each queue, one more is refused; 0 is no limit.",
        minimum=0,
    ),
    Option("queue_timeout_ms", 0, "How long a request may wait; 0 is for ever.", minimum=0),
    Option(
        "timeout_action",
        "reject",
        "What happens to one that has waited so long: reject it, or delay it behind all others.",
        choices=("reject", "delay"),
    ),
    Option(
        "queues",
        "",
        "Levels that differ from this, as in 1:size=4;3:size=2,timeout_ms=500,action=delay",
    ),
)


@hookimpl
def llmserve_register_batchings() -> Sequence[Batching]:
    """Register the dynamic batcher with a queue for every priority."""
    return [
        Batching(
            name="priorities",
            summary="Dynamic batches, the urgent requests first",
            # Who waits is for Triton to decide; what runs is what always runs whole batches.
            runtime="llmserve.runtime.batch:BatchDriver",
            prepare=_prepare,
            options=OPTIONS,
        )
    ]


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_priorities.prepare import prepare

    return prepare(context)
