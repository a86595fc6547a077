"""The Dockerfile of a repository: NVIDIA's container with what all its models need, pinned."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from llmserve.container import BASE_IMAGE, HF_HOME, IMAGE, MODELS
from llmserve.errors import IncompatibleError
from llmserve.manifest import Manifest, manifests, references

FILE = "Dockerfile"
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
    path.write_text(dockerfile(manifests(repository)), encoding="utf-8")
    return path


def dockerfile(models: Iterable[Manifest]) -> str:
    """Return a Dockerfile that installs what the models of a repository need."""
    pins: dict[str, tuple[str, str]] = {}
    for manifest in models:
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
#     docker build -t {IMAGE} .
#
# Packages that are on no index yet come from a folder of wheels:
#
#     docker build -t {IMAGE} --build-context wheels=DIR .

FROM scratch AS wheels

FROM {BASE_IMAGE}
RUN --mount=type=bind,from=wheels,target=/wheels \\
    pip install --no-cache-dir --break-system-packages --find-links /wheels \\
        {needs}
ENV HF_HOME={HF_HOME}
CMD ["tritonserver", "--model-repository={MODELS}"]
"""


def docker_run(repository: Path) -> str:
    """Return the command that serves the repository from the container, on loopback only."""
    ports = " ".join(f"-p 127.0.0.1:{port}:{port}" for port in (8000, 8001, 8002))
    mounts = [f"{repository.absolute()}:{MODELS}:ro"]
    mounts += [f"{path}:{path}:ro" for path in references(repository)]
    volumes = " ".join(f"-v {shlex.quote(mount)}" for mount in mounts)
    # The token goes by its name: its value stays in the environment.
    return (
        f"docker run --rm --gpus all --shm-size 1g {ports} -e HF_TOKEN "
        f'-v "${{HF_HOME:-$HOME/.cache/huggingface}}:{HF_HOME}" {volumes} {IMAGE}'
    )
