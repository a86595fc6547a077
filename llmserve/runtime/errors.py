"""What the runtime says when it refuses a request."""

from __future__ import annotations


class RequestError(Exception):
    """A request that cannot be served: one line, for the user who sent it.

    It is the user's to mend, so Triton answers 400 / INVALID_ARGUMENT and nothing is logged
    as a failure of the server.
    """
