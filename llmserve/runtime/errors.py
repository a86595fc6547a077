"""What the runtime says when it refuses a request."""

from __future__ import annotations


class RequestError(Exception):
    """A request that cannot be served: one line, for the user who sent it.

    It is the user's to mend, so Triton answers 400 / INVALID_ARGUMENT and nothing is logged
    as a failure of the server.
    """


def failure_line(error: Exception) -> str:
    """Return what a client is told of a failure that is not its own: its kind and first line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"the model failed: {type(error).__name__}: {first}"
