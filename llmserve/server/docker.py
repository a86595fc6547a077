"""Triton in a container, started through the ``docker`` command."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from llmserve.container import HF_HOME, MODELS, image_of
from llmserve.errors import ServerError
from llmserve.server.launch import Launch, Own, inherited_environment, server_command, triton_args
from llmserve.server.ports import Ports
from llmserve.server.settings import ServerSettings

# Inside, the server listens on every interface of the container; outside only --publish counts.
_INSIDE = Ports("0.0.0.0", http=8000, grpc=8001, metrics=8002)  # noqa: S104
# Passed by name: Docker reads the values from its own environment, so that
# a token never stands on a command line, where every user of the machine can read it.
_PASSED_ON = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT")


def find() -> Path:
    """Return the ``docker`` command, or raise where it is missing or nothing answers it."""
    command = shutil.which("docker")
    if command is None:
        raise ServerError("no docker command", mend="install Docker, or use --runtime embedded")
    if not _ask(command, "version", "--format", "{{.Server.Version}}"):
        raise ServerError(
            "Docker is installed and its daemon does not answer",
            mend="start it (and see that this user may use it), or use --runtime embedded",
        )
    return Path(command)


def prepare(settings: ServerSettings, own: Own) -> Launch:
    """Return how to start the container."""
    command = str(find())
    if not _ask(command, "image", "inspect", "--format", "{{.Id}}", settings.image):
        raise ServerError(
            f"there is no image {settings.image} here",
            mend=f"docker build -t {settings.image}{_own_file(settings)} {settings.repository}",
        )
    gpus = settings.gpus
    if gpus is None:
        gpus = "nvidia" in _ask(command, "info", "--format", "{{json .Runtimes}}")
    return Launch(
        argv=(command, *run_arguments(settings, own, gpus=gpus)),
        env=inherited_environment(),
        kind="container",
        # Killing the command leaves the container running.
        last_resort=(command, "rm", "--force", own.name),
    )


def _own_file(settings: ServerSettings) -> str:
    """Name the Dockerfile of an image that is not the repository's."""
    found = sorted(settings.repository.glob("*/Dockerfile"))
    own = [path for path in found if image_of(path.parent.name) == settings.image]
    return f" -f {own[0]}" if own else ""


def run_arguments(settings: ServerSettings, own: Own, *, gpus: bool) -> tuple[str, ...]:
    """Return the arguments of ``docker run``, up to those of the server inside."""
    published = (
        f"--publish={own.ports.host}:{outside}:{inside}"
        for outside, inside in (
            (own.ports.http, _INSIDE.http),
            (own.ports.grpc, _INSIDE.grpc),
            (own.ports.metrics, _INSIDE.metrics),
        )
    )
    cache = _cache_folder()
    return (
        "run",
        "--rm",
        f"--name={own.name}",
        *published,
        f"--mount=type=bind,source={settings.repository.resolve()},target={MODELS},readonly",
        *(f"--mount=type=bind,source={path},target={path},readonly" for path in settings.mounts),
        *((f"--mount=type=bind,source={cache},target={HF_HOME}",) if cache else ()),
        *(f"--env={variable}" for variable in _PASSED_ON if variable in os.environ),
        # The Python backend moves tensors through shared memory; Docker's default is 64 MiB.
        "--shm-size=1g",
        *(("--gpus=all",) if gpus else ()),
        settings.image,
        *server_command(
            settings,
            "tritonserver",
            triton_args(settings, replace(own, ports=_INSIDE)),
            repository=MODELS,
        ),
    )


def _cache_folder() -> Path | None:
    """Return where models of the hub are kept, if there is such a folder yet."""
    folder = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return folder.absolute() if folder.is_dir() else None


def _ask(command: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
