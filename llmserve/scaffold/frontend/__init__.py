"""The plugin ``scaffold``: a frontend of llmserve."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.plugin import Frontend, Place, UsageError, hookimpl


@hookimpl
def llmserve_register_frontends() -> Sequence[Frontend]:
    """Register the frontend; its module is imported only in its own process."""
    return [
        Frontend(
            name="scaffold",
            summary="Text in the body of a POST, and the answer in that of the response",
            command=_command,
            port=8090,
        )
    ]


def _command(place: Place) -> Sequence[str]:
    """Return the arguments of the Python interpreter that runs the frontend."""
    if place.keys:
        raise UsageError("scaffold knows no keys", hint="leave out --keys")
    return [
        *("-m", "llmserve.scaffold.frontend.server"),
        *("--host", place.host, "--port", str(place.port), "--url", place.url),
        *("--model", next(iter(place.models), "")),
        *("--grace", str(place.grace)),
    ]
