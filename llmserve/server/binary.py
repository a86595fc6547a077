"""A ``tritonserver`` that is installed on this machine, as in NVIDIA's containers."""

from __future__ import annotations

import shutil
from pathlib import Path

from llmserve.errors import ServerError
from llmserve.server.launch import Launch, Own, inherited_environment, triton_args
from llmserve.server.settings import ServerSettings

_USUAL = Path("/opt/tritonserver/bin/tritonserver")


def find() -> Path:
    """Return the server on PATH, else NVIDIA's usual one, or raise."""
    found = shutil.which("tritonserver") or shutil.which(_USUAL)
    if found is None:
        raise ServerError(
            f"no tritonserver on PATH or in {_USUAL.parent}",
            mend="use --runtime embedded or --runtime docker",
        )
    return Path(found).absolute()


def prepare(settings: ServerSettings, own: Own) -> Launch:
    """Return how to start it: with its own backends, in the environment as it is."""
    repository = str(settings.repository.resolve())
    arguments = triton_args(settings, own, repository=repository)
    return Launch(
        argv=(str(find()), *arguments),
        env=inherited_environment(),
        kind="local",
    )
