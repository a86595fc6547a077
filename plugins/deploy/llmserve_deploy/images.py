"""Dockerfiles of the two images: the gateway's, and Triton's with the models in it."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from llmserve.contract.container import HF_HOME, MODELS
from llmserve.errors import UsageError
from llmserve.plugin import install_command, make_wheels, sources, wheels_in
from llmserve_deploy.description import USER, Deployment

GATEWAY_DOCKERFILE = "Dockerfile.gateway"
MODELS_DOCKERFILE = "Dockerfile.models"
PYTHON = "python:3.12-slim"
OURS = ("llmserve", "llmserve-gateway")
"""The packages that the gateway's image needs."""

_GATEWAY = """\
# The gateway.
#
{sources}

FROM {python}
# This file too, since a pattern that matches nothing is an error on its own.
COPY {file} *.whl /wheels/
RUN pip install --no-cache-dir --find-links /wheels \\
        {packages}
RUN useradd --uid {user} --create-home llmserve
USER {user}
CMD ["llmserve", "gateway"]
"""

_MODELS = """\
# The models in the image that serves them; the context is the repository.
FROM {image}
# Whatever the folders' owner allows others: the pod's user reads them.
{copies}
RUN mkdir -p {cache} && chown {user} {cache}
USER {user}
"""


def image_files(d: Deployment) -> dict[str, Any]:
    """Return the Dockerfiles; that of the models is left out if they are on a volume."""
    files = {
        GATEWAY_DOCKERFILE: _GATEWAY.format(
            file=GATEWAY_DOCKERFILE, python=PYTHON, user=USER, **ours(d)
        )
    }
    if not d.volume:
        copies = "\n".join(
            f"COPY --chmod=755 {name}/ {MODELS}/{name}/" for name in sorted(d.folders)
        )
        files[MODELS_DOCKERFILE] = _MODELS.format(
            image=d.built_image, copies=copies, cache=HF_HOME, user=USER
        )
    return files


def vendored_wheels() -> dict[str, bytes]:
    """Return the wheels of the packages of ours that are installed here, by their file names."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            versions = {name: version(name) for name in OURS}
        except PackageNotFoundError as error:
            raise UsageError(
                f"--vendor needs {error.name}, which the gateway's image runs",
                hint=install_command(str(error.name)),
            ) from None
        make_wheels(versions, Path(folder))
        return {file: Path(folder, file).read_bytes() for file in wheels_in(Path(folder)).values()}


def ours(d: Deployment) -> dict[str, str]:
    """Return what a Dockerfile installs of llmserve, and a comment that says where it is from."""
    versions = {}
    for name in OURS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    requirements = [
        f"/wheels/{file}"
        if (file := d.wheels.get((name, versions.get(name, ""))))
        else f"{name}=={versions[name]}"
        if name in versions
        else name
        for name in OURS
    ]
    return {
        "packages": " ".join(requirements),
        "sources": sources(versions, d.wheels, "llmserve deploy --vendor"),
    }
