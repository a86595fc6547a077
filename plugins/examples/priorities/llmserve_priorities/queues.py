"""Parses the option that configures the queues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmserve.plugin import INT32_MAX, OptionError

_HINT = "write it as in 1:size=4;3:size=2,timeout_ms=500,action=delay"
_ACTIONS = ("reject", "delay")


@dataclass(frozen=True)
class Queue:
    """How many requests may wait, how long, and what happens then; 0 means no limit."""

    size: int = 0
    timeout_ms: int = 0
    action: str = "reject"


def parse_queues(text: str, *, levels: int, default: Queue) -> Mapping[int, Queue]:
    """Return the queues of the levels that differ from the default queue.

    >>> parse_queues("3:size=2,action=delay", levels=3, default=Queue(timeout_ms=500))
    {3: Queue(size=2, timeout_ms=500, action='delay')}
    """
    queues: dict[int, Queue] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        level, colon, settings = part.partition(":")
        if not colon or not level.strip().isdecimal():
            raise OptionError(f"queues cannot be parsed at {part!r}", hint=_HINT)
        number = int(level)
        if not 1 <= number <= levels:
            raise OptionError(
                f"queues has priority {number}, which does not exist", hint=f"use 1 to {levels}"
            )
        if number in queues:
            raise OptionError(f"queues has priority {number} twice", hint="combine the two")
        queues[number] = _parse_queue(settings, default)
    return queues


def _parse_queue(settings: str, default: Queue) -> Queue:
    queue = default
    for setting in settings.split(","):
        key, _, value = (word.strip() for word in setting.partition("="))
        if key == "action" and value in _ACTIONS:
            queue = replace(queue, action=value)
        elif key == "size" and value.isdecimal() and int(value) <= INT32_MAX:
            queue = replace(queue, size=int(value))
        elif key == "timeout_ms" and value.isdecimal() and int(value) <= INT32_MAX:
            queue = replace(queue, timeout_ms=int(value))
        else:
            raise OptionError(f"queues cannot be parsed at {setting.strip()!r}", hint=_HINT)
    return queue
