"""A ``tritonserver`` that is installed on this machine, as in NVIDIA's containers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from llmserve.errors import ServerError
from llmserve.server.launch import Launch, Own, inherited_environment, server_command, triton_args
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
    server = find()
    command = server_command(
        settings, str(server), triton_args(settings, own), repository=repository
    )
    env = inherited_environment()
    # A script calls the server by its name.
    env["PATH"] = os.pathsep.join([str(server.parent), env.get("PATH", os.defpath)])
    return Launch(
        argv=command,
        env=env,
        kind="local",
    )
