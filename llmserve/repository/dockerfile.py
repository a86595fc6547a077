"""Dockerfiles of repositories, and of models that need another image than the repository's."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from llmserve.contract.container import (
    LOOPBACK,
    NEWEST,
    UNKNOWN,
    Release,
    addresses,
    closed,
    release_in,
)
from llmserve.errors import ConfigError, OutputError, UsageError
from llmserve.repository.manifest import Manifest, model_folders, references

BASE_IMAGE = f"nvcr.io/nvidia/tritonserver:{NEWEST}-py3"
"""NVIDIA's release on which emitted Dockerfiles are based."""

IMAGE = "llmserve-triton"
"""The name of the image built from such a Dockerfile."""

LAUNCH_SCRIPT = "launch.sh"
"""A model's script that starts the server, for engines of several processes."""

MODELS = "/models"
HF_HOME = "/hf"
"""The paths of the repository and the hub's cache inside the container."""
_SELECTED = "/selected"
"""The path of links to the models that an image serves, if it does not serve them all."""


def image_of(model: str = "") -> str:
    """Return the name of the image of a repository, or of a model that has its own image."""
    # Docker accepts only lowercase letters and no repeated separators.
    suffix = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return f"{IMAGE}-{suffix}" if suffix else IMAGE


PLAIN = ""
"""Denotes NVIDIA's plain image."""


def manifests_of(
    repository: Path, *, without: Collection[str] = (), ignore_damaged: bool = False
) -> dict[str, Manifest | None]:
    """Return the manifests of a repository's models, except those of ensemble parts.

    A model that llmserve did not build has None: it is served together with the others.
    ``ignore_damaged`` treats a damaged manifest as a missing one.
    """
    manifests: dict[str, Manifest | None] = {}
    for folder in model_folders(repository) if repository.is_dir() else ():
        if folder.name in without or folder.name.startswith("."):
            continue
        try:
            manifest = Manifest.read(folder)
        except ConfigError:
            if not ignore_damaged:
                raise
            manifest = None
        if not (manifest and manifest.part_of):
            manifests[folder.name] = manifest
    return manifests


def groups(
    models: Mapping[str, Manifest | None],
) -> tuple[dict[str, Manifest | None], dict[str, Manifest]]:
    """Return the models that the repository's image serves, and the others.

    If they need different images, it serves those of the plain one, which have no Dockerfile of
    their own; if there are none of these, those of the image whose name sorts last, which is
    NVIDIA's newest.
    """
    images = {manifest.image for manifest in models.values() if manifest}
    chosen = PLAIN if PLAIN in images else max(images, key=lambda image: image or "", default=PLAIN)
    others = {name: m for name, m in models.items() if m and m.image != chosen}
    return {name: m for name, m in models.items() if name not in others}, others


FILE = "Dockerfile"
_MARK = (
    "# Written by `llmserve build`, and again by the next; take this line out to keep your edits."
)
_TEXT = """{head}
#
#     {build}
#
# Packages that are not on an index yet are installed from a folder of wheels:
#
#     {build_with}

{argument}FROM scratch AS wheels

FROM {image}
{notes}RUN --mount=type=bind,from=wheels,target=/wheels \\
    {pip} --find-links /wheels \\
        {packages}
ENV HF_HOME={home}
CMD {command}
"""
_OPEN = (
    "# Before 24.07, Triton lets whoever reaches it change it. So this one listens on loopback:",
    "# give the container the machine's network, or that of its client.",
)
_IMAGE_ARGUMENT = """# The base image for this model is not known: name it with --build-arg.
ARG IMAGE

"""


def updated(
    repository: Path,
    built: Mapping[str, Manifest | None],
    *,
    newest: str,
    removed: Collection[str] = (),
) -> str | None:
    """Return the Dockerfile of a repository with these newly built models.

    ``removed`` are models that this build removes. The file is in the repository's folder, where
    Triton ignores files, so that it is copied with the models. A file without our first line is the
    user's own and stays: the result is None. It is empty if no model is left that llmserve built.
    """
    if _is_user_owned(repository / FILE):
        return None
    # Replaced models may be damaged; others may not, because their packages would be unknown.
    others = manifests_of(repository, without={*built, *removed})
    new = {name: m for name, m in built.items() if not (m and m.part_of)}
    models = {**others, **new}
    return of_repository(models, newest) if any(models.values()) else ""


def _is_user_owned(path: Path) -> bool:
    try:
        # Read as bytes, since a user's file may have any encoding.
        return path.exists() and not path.read_bytes().startswith(_MARK.encode())
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from None


def of_repository(models: Mapping[str, Manifest | None], newest: str) -> str:
    """Return a Dockerfile that serves as many of the models as one image can.

    A container has one version of each package: that of the newest model, because an upgrade must
    start with one model. Models built with other versions are named in a comment, and so are those
    that need another image; each of these has its own Dockerfile.
    """
    served, others = groups(models)
    built = {name: manifest for name, manifest in sorted(served.items()) if manifest}
    pins: dict[str, str] = {}
    for name in sorted(built, key=lambda name: (name == newest, name)):
        pins |= built[name].packages
    notes = [
        f"# {name} was built with {package} {version}: build it again."
        for name, manifest in built.items()
        for package, version in sorted(manifest.packages.items())
        if pins[package] != version
    ]
    for name, manifest in sorted(others.items()):
        notes += [
            f"# {name} is not served by this image: it needs {manifest.image or 'another'}.",
            f"#     {docker_build(Path(), name, manifest.image)}",
        ]
    image = next((manifest.image for manifest in built.values()), PLAIN)
    brought = {package for manifest in built.values() for package in manifest.brought}
    packages = {name: version for name, version in pins.items() if name not in brought}
    # An engine of several processes is started by a script, which accepts the same arguments.
    scripts = [name for name, manifest in built.items() if LAUNCH_SCRIPT in manifest.files]
    if scripts[1:]:
        names = " and ".join(scripts)
        notes.append(f"# {names} each need their own image: build with -f NAME/{FILE}.")
    script = f"{MODELS}/{scripts[0]}/{LAUNCH_SCRIPT}" if scripts else ""
    selected = _load_order(served) if others else []
    command = _command(image, script, selected=bool(selected))
    notes += [_select(selected)] if selected else []
    return _render([_MARK], docker_build(Path(), "", image), image, packages, notes, command)


def of_model(name: str, manifest: Manifest, folder: Path) -> str:
    """Return the Dockerfile of a model that needs its own image."""
    head = [
        f"# Serves {name} from an image with what it needs: none of the image's packages is",
        "# replaced, and no other model of the repository is loaded.",
    ]
    script = f"{MODELS}/{name}/{LAUNCH_SCRIPT}" if (folder / LAUNCH_SCRIPT).is_file() else ""
    command = _command(manifest.image, script, selected=True)
    build = docker_build(Path(), name, manifest.image)
    packages = {n: version for n, version in manifest.packages.items() if n not in manifest.brought}
    notes = [_select(_load_order({name: manifest}))]
    return _render(head, build, manifest.image, packages, notes, command)


def _render(
    head: Sequence[str],
    build: str,
    image: str | None,
    packages: Mapping[str, str],
    notes: Sequence[str],
    command: Sequence[str],
) -> str:
    pins = [f"{name}=={version}" for name, version in sorted(packages.items())]
    # Set as a variable, because a pip that is too old for the option ignores it.
    pip = "PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir"
    if not triton_of(image).closes:
        notes = [*notes, *_OPEN]
    separator = ", \\\n     " if len(command) > 2 else ", "
    return _TEXT.format(
        head="\n".join(head),
        build=build,
        build_with=f"{build.removesuffix(' .')} --build-context wheels=DIR .",
        argument="" if image is not None else _IMAGE_ARGUMENT,
        image="${IMAGE}" if image is None else image or BASE_IMAGE,
        notes="".join(f"{line}\n" for line in notes),
        # Dependencies must not replace packages of an image other than the plain one.
        pip=pip if image == PLAIN else f"{pip} --no-deps",
        packages=" \\\n        ".join(shlex.quote(pin) for pin in pins),
        home=HF_HOME,
        command=f"[{separator.join(json.dumps(word) for word in command)}]",
    )


def _command(image: str | None, script: str, *, selected: bool) -> list[str]:
    models = _SELECTED if selected else MODELS
    start = ["sh", script, models] if script else ["tritonserver", f"--model-repository={models}"]
    triton = triton_of(image)
    return [*start, *addresses(triton), *closed(triton)]


def triton_of(image: str | None) -> Release:
    """Return the Triton in the image that a manifest names."""
    return UNKNOWN if image is None else release_in(image or BASE_IMAGE)


def select(models: Sequence[str], folder: str, repository: str = MODELS) -> str:
    """Return the shell command that links models of the container into a folder to serve.

    Triton could also be told their names, but only in the mode in which it loads models for
    whoever asks, and a model is code.
    """
    paths = " ".join(shlex.quote(f"{repository}/{name}") for name in models)
    return f"mkdir -p {folder} && ln -sf {paths} {folder}"


def _select(models: Sequence[str]) -> str:
    separate_lines = select(models, _SELECTED).replace(f" {MODELS}/", f" \\\n        {MODELS}/")
    return f"RUN {separate_lines}"


def _load_order(models: Mapping[str, Manifest | None]) -> list[str]:
    """Return the names of models in loading order: an ensemble's parts before the ensemble."""
    return [
        part
        for name, manifest in sorted(models.items())
        for part in (*(manifest.parts if manifest else ()), name)
    ]


def docker_build(repository: Path, name: str, image: str | None) -> str:
    """Return the command that builds the image of a repository, or of one of its models."""
    file = f" -f {shlex.quote(str(repository / name / FILE))}" if name else ""
    argument = " --build-arg IMAGE=..." if image is None else ""
    return f"docker build -t {image_of(name)}{file}{argument} {shlex.quote(str(repository))}"


def served_by(repository: Path, models: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the name of the image that serves these models, and the models to load.

    Without ``models``, it is the repository's image with all the models that it can serve; the list
    is empty if that is all of them. A user's own image is assumed to serve every model.
    """
    manifests = manifests_of(repository, ignore_damaged=True)
    served, others = groups(manifests)
    if not others or _is_user_owned(repository / FILE):
        return IMAGE, tuple(models)
    if not models:
        return IMAGE, tuple(_load_order(served))
    selected = {name: manifest for name in models if (manifest := manifests.get(name))}
    separate = [name for name in models if name in others]
    if len({manifest.image for manifest in selected.values()}) > 1:
        names = " and ".join(selected)
        raise UsageError(f"{names} need different images", mend=f"serve one: --model {separate[0]}")
    return image_of(separate[0] if separate else ""), tuple(models)


def docker_run(repository: Path, name: str, image: str | None) -> str:
    """Return the command that serves the repository, or a model with its own image, from the
    container, on loopback only."""
    ports = " ".join(f"-p {LOOPBACK}:{port}:{port}" for port in (8000, 8001, 8002))
    if not triton_of(image).closes:
        # It listens on loopback, which is the container's own unless it has the machine's network.
        ports = "--network host"
    mounts = [f"{repository.absolute()}:{MODELS}:ro"]
    mounts += [f"{path}:{path}:ro" for path in references(repository)]
    volumes = " ".join(f"-v {shlex.quote(mount)}" for mount in mounts)
    # Only the token's variable is named: its value stays in the environment.
    return (
        f"docker run --rm --gpus all --shm-size 1g {ports} -e HF_TOKEN "
        f'-v "${{HF_HOME:-$HOME/.cache/huggingface}}:{HF_HOME}" {volumes} {image_of(name)}'
    )
