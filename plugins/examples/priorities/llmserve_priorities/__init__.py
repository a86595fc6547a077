"""The plugin ``priorities``: Triton's dynamic batcher with a queue for each priority."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.plugin import DECOUPLED_OPTION, Batching, BuildContext, Option, hookimpl

# Triton keeps a queue for every level, so more levels than needed only cost resources.
_MAX_LEVELS = 100

OPTIONS = (
    Option("max_batch_size", 8, "Most prompts in one batch.", minimum=1),
    DECOUPLED_OPTION,
    Option(
        "priority_levels",
        3,
        "Number of priorities; requests with 1 run first.",
        minimum=1,
        maximum=_MAX_LEVELS,
    ),
    Option(
        "default_priority",
        2,
        "Priority of a request without one.",
        minimum=1,
        maximum=_MAX_LEVELS,
    ),
    Option(
        "queue_size",
        0,
        "Most requests that wait in each queue; further ones are refused. 0 means no limit.",
        minimum=0,
    ),
    Option("queue_timeout_ms", 0, "How long a request may wait; 0 means no limit.", minimum=0),
    Option(
        "timeout_action",
        "reject",
        "Whether to reject a request that waited this long, or to delay it behind all others.",
        choices=("reject", "delay"),
    ),
    Option(
        "queues",
        "",
        "Levels with other values, as in 1:size=4;3:size=2,timeout_ms=500,action=delay",
    ),
)


@hookimpl
def llmserve_register_batchings() -> Sequence[Batching]:
    return [
        Batching(
            name="priorities",
            summary="Dynamic batches, urgent requests first",
            # Triton decides which requests wait; the usual driver runs the batches.
            runtime="llmserve.runtime:BatchDriver",
            prepare=_prepare,
            options=OPTIONS,
        )
    ]


def _prepare(context: BuildContext) -> Mapping[str, Any]:
    from llmserve_priorities.prepare import prepare

    return prepare(context)
