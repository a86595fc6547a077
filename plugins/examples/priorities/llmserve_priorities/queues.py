"""What a queue does with those who wait, as an option's text says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmserve.plugin import INT32_MAX, OptionError

_MEND = "write it as in 1:size=4;3:size=2,timeout_ms=500,action=delay"
_ACTIONS = ("reject", "delay")


@dataclass(frozen=True)
class Queue:
    """How many may wait, how long, and what happens then; 0 is no limit."""

    size: int = 0
    timeout_ms: int = 0
    action: str = "reject"


def parse_queues(text: str, *, levels: int, usual: Queue) -> Mapping[int, Queue]:
    """Return the levels that differ from the usual queue.

    >>> parse_queues("3:size=2,action=delay", levels=3, usual=Queue(timeout_ms=500))
    {3: Queue(size=2, timeout_ms=500, action='delay')}
    """
    queues: dict[int, Queue] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        level, colon, settings = part.partition(":")
        if not colon or not level.strip().isdecimal():
            raise OptionError(f"queues cannot be read at {part!r}", mend=_MEND)
        number = int(level)
        if not 1 <= number <= levels:
            raise OptionError(f"queues names priority {number}, and there are 1 to {levels}")
        if number in queues:
            raise OptionError(f"queues names priority {number} twice", mend="put both into one")
        queues[number] = _queue(settings, usual)
    return queues


def _queue(settings: str, usual: Queue) -> Queue:
    queue = usual
    for setting in settings.split(","):
        key, _, value = (word.strip() for word in setting.partition("="))
        if key == "action" and value in _ACTIONS:
            queue = replace(queue, action=value)
        elif key == "size" and value.isdecimal() and int(value) <= INT32_MAX:
            queue = replace(queue, size=int(value))
        elif key == "timeout_ms" and value.isdecimal() and int(value) <= INT32_MAX:
            queue = replace(queue, timeout_ms=int(value))
        else:
            raise OptionError(f"queues cannot be read at {setting.strip()!r}", mend=_MEND)
    return queue
