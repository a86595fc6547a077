"""The scheduler's part of the configuration, from the options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.plugin import BuildContext, OptionError
from llmserve_priorities.queues import Queue, parse_queues

# Triton lets a request ask only for less time than its queue gives, and 0, which means that there
# is no limit, counts as none to be below. So "for ever" is written as a hundred years.
_FOR_EVER = 100 * 365 * 24 * 3600 * 1000

_ACTIONS = {
    "reject": pb.ModelQueuePolicy.TimeoutAction.REJECT,
    "delay": pb.ModelQueuePolicy.TimeoutAction.DELAY,
}


def prepare(context: BuildContext) -> Mapping[str, Any]:
    """Give every priority its queue; the driver needs no settings."""
    options, config = context.options, context.config
    levels, default = int(options["priority_levels"]), int(options["default_priority"])
    if default > levels:
        raise OptionError(
            f"default_priority {default} is over priority_levels {levels}", mend="lower it"
        )
    usual = Queue(
        size=int(options["queue_size"]),
        timeout_ms=int(options["queue_timeout_ms"]),
        action=str(options["timeout_action"]),
    )
    batching = config.dynamic_batching
    batching.priority_levels = levels
    batching.default_priority_level = default
    _write(batching.default_queue_policy, usual)
    different = parse_queues(str(options["queues"]), levels=levels, usual=usual)
    for level in sorted(different):
        _write(batching.priority_queue_policy[level], different[level])
    if options["decoupled"]:
        context.streams()
    return {}


def _write(policy: Any, queue: Queue) -> None:
    policy.timeout_action = _ACTIONS[queue.action]
    policy.default_timeout_microseconds = (queue.timeout_ms or _FOR_EVER) * 1000
    policy.allow_timeout_override = True
    policy.max_queue_size = queue.size
