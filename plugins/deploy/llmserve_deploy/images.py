"""Dockerfiles of the two images: the gateway's, and Triton's with the models in it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from llmserve.repository.dockerfile import MODELS
from llmserve_deploy.description import HUB_CACHE, USER, Deployment

GATEWAY_DOCKERFILE = "Dockerfile.gateway"
MODELS_DOCKERFILE = "Dockerfile.models"
PYTHON = "python:3.12-slim"

_GATEWAY = """\
# The gateway. Packages that are not on an index yet are installed from a folder of wheels:
# docker build -t NAME -f {file} --build-context wheels=DIR .
FROM scratch AS wheels

FROM {python}
RUN --mount=type=bind,from=wheels,target=/wheels \\
    pip install --no-cache-dir --find-links /wheels {packages}
RUN useradd --uid {user} --create-home llmserve
USER {user}
CMD ["llmserve", "gateway"]
"""

_MODELS = """\
# The models in the image that serves them; the context is the repository.
FROM {image}
{copies}
RUN mkdir -p {cache} && chown {user} {cache}
USER {user}
"""


def image_files(d: Deployment) -> dict[str, Any]:
    """Return the Dockerfiles; that of the models is left out if they are on a volume."""
    packages = " ".join(pinned(name) for name in ("llmserve", "llmserve-gateway"))
    files = {
        GATEWAY_DOCKERFILE: _GATEWAY.format(
            file=GATEWAY_DOCKERFILE, python=PYTHON, packages=packages, user=USER
        )
    }
    if not d.volume:
        copies = "\n".join(f"COPY {name}/ {MODELS}/{name}/" for name in sorted(d.folders))
        files[MODELS_DOCKERFILE] = _MODELS.format(
            image=d.built_image, copies=copies, cache=HUB_CACHE, user=USER
        )
    return files


def pinned(name: str) -> str:
    """Return a requirement for a package, with the installed version if there is one."""
    try:
        return f"{name}=={version(name)}"
    except PackageNotFoundError:
        return name
