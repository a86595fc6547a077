"""The Dockerfile of a repository: NVIDIA's container with what all its models need, pinned."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from llmserve.errors import IncompatibleError
from llmserve.manifest import Manifest

FILE = "Dockerfile"
IMAGE = "nvcr.io/nvidia/tritonserver"
TAG = "26.10-py3"
_MARK = (
    "# Written by `llmserve build`, and again by the next; take this line out to keep your edits."
)


def write_dockerfile(repository: Path) -> Path:
    """Write the Dockerfile for all models of a repository, beside them.

    It lies in the repository's folder, where Triton overlooks files, so that it travels with
    the models. One that lost its first line is the user's own and stays.
    """
    path = repository / FILE
    if path.exists() and not path.read_text(encoding="utf-8").startswith(_MARK):
        return path
    manifests = (Manifest.read(folder) for folder in sorted(repository.iterdir()))
    path.write_text(dockerfile(m for m in manifests if m), encoding="utf-8")
    return path


def dockerfile(manifests: Iterable[Manifest]) -> str:
    """Return a Dockerfile that installs what the models of a repository need."""
    pins: dict[str, tuple[str, str]] = {}
    for manifest in manifests:
        for package, version in manifest.packages.items():
            other = pins.setdefault(package, (version, manifest.name))
            if other[0] != version:
                raise IncompatibleError(
                    f"{manifest.name} was built with {package} {version} and {other[1]} with "
                    f"{other[0]}, and one container has only one",
                    mend=f"build {other[1]} again, or use another --output",
                )
    needs = " \\\n        ".join(f"{package}=={version}" for package, (version, _) in pins.items())
    return f"""{_MARK}
#
#     docker build -t llmserve-triton .
#
# Packages that are on no index yet come from a folder of wheels:
#
#     docker build -t llmserve-triton --build-context wheels=DIR .

FROM scratch AS wheels

FROM {IMAGE}:{TAG}
RUN --mount=type=bind,from=wheels,target=/wheels \\
    pip install --no-cache-dir --break-system-packages --find-links /wheels \\
        {needs}
ENV HF_HOME=/hf
CMD ["tritonserver", "--model-repository=/models"]
"""


def docker_run(repository: Path, referenced: Iterable[Path]) -> str:
    """Return the command that serves the repository from the container, on loopback only."""
    mounts = [f"{repository.absolute()}:/models:ro"]
    mounts += [f"{path}:{path}:ro" for path in referenced]
    words = ["docker", "run", "--rm", "--gpus", "all", "--shm-size", "1g"]
    words += [word for port in (8000, 8001, 8002) for word in ("-p", f"127.0.0.1:{port}:{port}")]
    # The token goes by its name: its value stays in the environment.
    words += ["-e", "HF_TOKEN"]
    text = " ".join(shlex.quote(word) for word in words)
    text += ' -v "${HF_HOME:-$HOME/.cache/huggingface}:/hf" '
    text += " ".join(f"-v {shlex.quote(mount)}" for mount in mounts)
    return f"{text} llmserve-triton"
