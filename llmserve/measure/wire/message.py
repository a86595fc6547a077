"""A call on a connection, and gRPC's messages in its data."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from llmserve.measure.wire import hpack
from llmserve.measure.wire.call import Arrivals, Ended

LENGTH = struct.Struct(">BI")
"""What stands before a message: whether it is compressed, and how long it is."""
NEVER = float("inf")


@dataclass(eq=False)
class Call:
    """A call that is under way; ``ended`` hears its status, unless it is cancelled before."""

    arrivals: Arrivals
    ended: Ended
    unsent: bytes
    window: int = 0
    deadline: float = NEVER
    over: bool = False
    stream: int = 0
    partial: bytes = b""
    status: dict[str, str] = field(default_factory=dict)

    def take(self, now: float, data: bytes) -> None:
        """Cut data into messages, which may span frames or share one."""
        if self.partial:
            data = self.partial + data
        at = 0
        while len(data) - at >= LENGTH.size:
            packed, length = LENGTH.unpack_from(data, at)
            end = at + LENGTH.size + length
            if end > len(data):
                break
            if packed:
                raise hpack.UnreadableError("a compressed message, which was not asked for")
            self.arrivals.append((now, data[at + LENGTH.size : end]))
            at = end
        self.partial = data[at:]

    def end(self, code: str, details: str) -> None:
        """Tell how it ended, once."""
        if not self.over:
            self.over = True
            self.ended(code, details)
