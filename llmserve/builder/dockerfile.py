"""The Dockerfile of a repository: NVIDIA's container with what all its models need, pinned."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

from llmserve.container import BASE_IMAGE, HF_HOME, IMAGE, MODELS
from llmserve.errors import OutputError
from llmserve.manifest import Manifest, references

FILE = "Dockerfile"
_MARK = (
    "# Written by `llmserve build`, and again by the next; take this line out to keep your edits."
)


def updated(
    repository: Path,
    built: Mapping[str, Mapping[str, str]],
    *,
    newest: str,
    gone: Collection[str] = (),
) -> str | None:
    """Return the Dockerfile that a repository gets with models that need these packages.

    ``gone`` are models that this build takes away. The file lies in the repository's folder,
    where Triton overlooks files, so that it travels with the models. One that lost its first
    line is the user's own and stays: that is None.
    """
    path = repository / FILE
    try:
        # As bytes, since a file of the user's own may be in any encoding.
        if path.exists() and not path.read_bytes().startswith(_MARK.encode()):
            return None
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from None
    models = dict(built)
    for folder in repository.iterdir() if repository.is_dir() else ():
        # What is replaced may be damaged; a neighbour may not, for its packages are not known.
        if folder.name not in {*built, *gone} and (manifest := Manifest.read(folder)):
            models[folder.name] = manifest.packages
    return dockerfile(models, newest)


def dockerfile(models: Mapping[str, Mapping[str, str]], newest: str) -> str:
    """Return a Dockerfile that installs what models need: their packages by their names.

    One container has one version of a package: that of the newest model, for an upgrade has to
    begin with one of them. Models built with another are named in a comment.
    """
    pins: dict[str, str] = {}
    for name in sorted(models, key=lambda name: (name == newest, name)):
        pins |= models[name]
    needs = " \\\n        ".join(
        shlex.quote(f"{package}=={version}") for package, version in sorted(pins.items())
    )
    notes = "".join(
        f"# {name} was built with {package} {version}: build it again.\n"
        for name in sorted(models)
        for package, version in sorted(models[name].items())
        if pins[package] != version
    )
    return f"""{_MARK}
#
#     docker build -t {IMAGE} .
#
# Packages that are on no index yet come from a folder of wheels:
#
#     docker build -t {IMAGE} --build-context wheels=DIR .

FROM scratch AS wheels

FROM {BASE_IMAGE}
{notes}RUN --mount=type=bind,from=wheels,target=/wheels \\
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
