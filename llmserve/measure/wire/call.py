"""What both ways of travelling have in common."""

from __future__ import annotations

Arrivals = list[tuple[float, bytes]]
"""Messages with the moment each came, by the monotonic clock."""


class Broken(Exception):
    """A call that did not end well: gRPC's name of the status, and what the server says."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
