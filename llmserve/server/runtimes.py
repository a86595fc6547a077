"""Which Triton to run: the one asked for, or the first there is."""

from __future__ import annotations

from llmserve.errors import ServerError
from llmserve.server import binary, docker, embedded
from llmserve.server.launch import Launch, Own
from llmserve.server.settings import Runtime, ServerSettings


def prepare(settings: ServerSettings, own: Own) -> Launch:
    """Return how to start the server that ``settings.runtime`` names."""
    runtime = first_available() if settings.runtime == "auto" else settings.runtime
    if runtime == "binary":
        return binary.prepare(settings, own)
    if runtime == "embedded":
        return embedded.prepare(settings, own)
    return docker.prepare(settings, own)


def first_available() -> Runtime:
    """Return what ``auto`` means on this machine, or raise with the reason for each."""
    reasons = []
    ways: tuple[Runtime, ...] = ("binary", "embedded", "docker")
    for way, module in zip(ways, (binary, embedded, docker), strict=True):
        try:
            module.find()
        except ServerError as error:
            reasons.append(f"{way}: {error.problem}")
        else:
            return way
    raise ServerError(
        f"there is no Triton here ({'; '.join(reasons)})",
        mend="put tritonserver on PATH, or pip install 'llmserve[embedded]' "
        "on Python 3.10 to 3.12, or start Docker",
    )
