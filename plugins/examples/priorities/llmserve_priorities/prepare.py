"""Writes the options to the scheduler's part of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.plugin import BuildContext, OptionError
from llmserve_priorities.queues import Queue, parse_queues

# Triton lets a request set only a shorter time-out than its queue's, and compares with 0, which
# means no limit, as if it were the shortest. So "no limit" is written as a hundred years.
_NO_LIMIT_MS = 100 * 365 * 24 * 3600 * 1000

_ACTIONS = {
    "reject": pb.ModelQueuePolicy.TimeoutAction.REJECT,
    "delay": pb.ModelQueuePolicy.TimeoutAction.DELAY,
}


def prepare(context: BuildContext) -> Mapping[str, Any]:
    """Configure a queue for every priority; the driver needs no settings."""
    options, config = context.options, context.config
    levels, default = int(options["priority_levels"]), int(options["default_priority"])
    if default > levels:
        raise OptionError(
            f"default_priority {default} is over priority_levels {levels}", hint="lower it"
        )
    default_queue = Queue(
        size=int(options["queue_size"]),
        timeout_ms=int(options["queue_timeout_ms"]),
        action=str(options["timeout_action"]),
    )
    batching = config.dynamic_batching
    batching.priority_levels = levels
    batching.default_priority_level = default
    _write(batching.default_queue_policy, default_queue)
    queues = parse_queues(str(options["queues"]), levels=levels, default=default_queue)
    for level in sorted(queues):
        _write(batching.priority_queue_policy[level], queues[level])
    if options["decoupled"]:
        context.streams()
    return {}


def _write(policy: Any, queue: Queue) -> None:
    policy.timeout_action = _ACTIONS[queue.action]
    policy.default_timeout_microseconds = (queue.timeout_ms or _NO_LIMIT_MS) * 1000
    policy.allow_timeout_override = True
    policy.max_queue_size = queue.size
