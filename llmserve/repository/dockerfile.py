"""Dockerfiles: of a repository, and of a model that the repository's cannot serve."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from llmserve.errors import ConfigError, OutputError, UsageError
from llmserve.repository.manifest import Manifest, model_folders, references

BASE_IMAGE = "nvcr.io/nvidia/tritonserver:26.10-py3"
"""NVIDIA's release that emitted Dockerfiles begin with."""

IMAGE = "llmserve-triton"
"""What the image made from such a Dockerfile is called."""

LAUNCH_SCRIPT = "launch.sh"
"""A model's own start of the server, where one process is not enough."""

MODELS = "/models"
HF_HOME = "/hf"
"""Where the repository and the hub's cache are inside."""


def image_of(model: str = "") -> str:
    """Return what an image is called: a repository's, or that of a model with one of its own."""
    # Docker takes small letters, and no two separators in a row.
    own = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return f"{IMAGE}-{own}" if own else IMAGE


PLAIN = ""
"""Stands for NVIDIA's plain image."""


def manifests_of(
    repository: Path, *, without: Collection[str] = (), patient: bool = False
) -> dict[str, Manifest | None]:
    """Return the manifests of a repository's models, but for parts, whose models speak for them.

    A model that llmserve did not build has none: it goes wherever the others go. ``patient`` takes
    a damaged manifest for none.
    """
    found: dict[str, Manifest | None] = {}
    for folder in model_folders(repository) if repository.is_dir() else ():
        if folder.name in without or folder.name.startswith("."):
            continue
        try:
            manifest = Manifest.read(folder)
        except ConfigError:
            if not patient:
                raise
            manifest = None
        if not (manifest and manifest.part_of):
            found[folder.name] = manifest
    return found


def groups(
    models: Mapping[str, Manifest | None],
) -> tuple[dict[str, Manifest | None], dict[str, Manifest]]:
    """Return the models that the repository's image serves, and the others.

    Where they need different images it serves those of the plain one, which have no Dockerfile of
    their own; where there are none of these, those of the image whose name sorts last, which is
    NVIDIA's newest.
    """
    images = {manifest.image for manifest in models.values() if manifest}
    chosen = PLAIN if PLAIN in images else max(images, key=lambda image: image or "", default=PLAIN)
    others = {name: each for name, each in models.items() if each and each.image != chosen}
    return {name: each for name, each in models.items() if name not in others}, others


FILE = "Dockerfile"
_MARK = (
    "# Written by `llmserve build`, and again by the next; take this line out to keep your edits."
)
_TEXT = """{head}
#
#     {build}
#
# Packages that are on no index yet come from a folder of wheels:
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
_ASKED = """# Which image has what this needs is not known: --build-arg names it.
ARG IMAGE

"""


def updated(
    repository: Path,
    built: Mapping[str, Manifest | None],
    *,
    newest: str,
    gone: Collection[str] = (),
) -> str | None:
    """Return the Dockerfile that a repository gets with these models.

    ``gone`` are models that this build takes away.
    The file lies in the repository's folder, where Triton overlooks files, so that it travels
    with the models. One that lost its first line is the user's own and stays: that is None.
    """
    if _is_users(repository / FILE):
        return None
    # What is replaced may be damaged; a neighbour may not, for its packages are not known.
    neighbours = manifests_of(repository, without={*built, *gone})
    ours = {name: each for name, each in built.items() if not (each and each.part_of)}
    return of_repository({**neighbours, **ours}, newest)


def _is_users(path: Path) -> bool:
    try:
        # As bytes, since a file of the user's own may be in any encoding.
        return path.exists() and not path.read_bytes().startswith(_MARK.encode())
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from None


def of_repository(models: Mapping[str, Manifest | None], newest: str) -> str:
    """Return a Dockerfile that serves models, as many of them as one image can.

    One container has one version of a package: that of the newest model, for an upgrade has to
    begin with one of them. Models built with another are named in a comment, and so are those
    that need another image: each of these has a Dockerfile of its own.
    """
    served, others = groups(models)
    known = {name: manifest for name, manifest in sorted(served.items()) if manifest}
    pins: dict[str, str] = {}
    for name in sorted(known, key=lambda name: (name == newest, name)):
        pins |= known[name].packages
    notes = [
        f"# {name} was built with {package} {version}: build it again."
        for name, manifest in known.items()
        for package, version in sorted(manifest.packages.items())
        if pins[package] != version
    ]
    for name, manifest in sorted(others.items()):
        notes += [
            f"# {name} is not served by this image: it needs {manifest.image or 'another'}.",
            f"#     {docker_build(Path(), name, manifest.image)}",
        ]
    image = next((manifest.image for manifest in known.values()), PLAIN)
    brought = {package for manifest in known.values() for package in manifest.brought}
    packages = {name: version for name, version in pins.items() if name not in brought}
    # An engine of several processes is started by a script, which takes the same words.
    scripts = [name for name, manifest in known.items() if LAUNCH_SCRIPT in manifest.files]
    if scripts[1:]:
        notes.append(f"# {' and '.join(scripts)} need an image each: build with -f NAME/{FILE}.")
    script = f"{MODELS}/{scripts[0]}/{LAUNCH_SCRIPT}" if scripts else ""
    command = _command(_loaded(served) if others else (), script)
    return _written([_MARK], docker_build(Path(), "", image), image, packages, notes, command)


def of_model(name: str, manifest: Manifest, folder: Path) -> str:
    """Return the Dockerfile of a model that needs an image of its own."""
    head = [
        f"# {name} in an image that has what it needs: nothing that this brings is replaced, and",
        "# no other model of the repository is loaded.",
    ]
    script = f"{MODELS}/{name}/{LAUNCH_SCRIPT}" if (folder / LAUNCH_SCRIPT).is_file() else ""
    command = _command(_loaded({name: manifest}), script)
    build = docker_build(Path(), name, manifest.image)
    packages = {n: version for n, version in manifest.packages.items() if n not in manifest.brought}
    return _written(head, build, manifest.image, packages, (), command)


def _written(
    head: Sequence[str],
    build: str,
    image: str | None,
    packages: Mapping[str, str],
    notes: Sequence[str],
    command: Sequence[str],
) -> str:
    pins = [f"{name}=={version}" for name, version in sorted(packages.items())]
    # By its variable, which a pip that is too old for the option passes over.
    pip = "PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir"
    between = ", \\\n     " if len(command) > 2 else ", "
    return _TEXT.format(
        head="\n".join(head),
        build=build,
        build_with=f"{build.removesuffix(' .')} --build-context wheels=DIR .",
        argument="" if image is not None else _ASKED,
        image="${IMAGE}" if image is None else image or BASE_IMAGE,
        notes="".join(f"{line}\n" for line in notes),
        # An image that brings its own keeps it, whatever a package says that it depends on.
        pip=pip if image == PLAIN else f"{pip} --no-deps",
        packages=" \\\n        ".join(shlex.quote(pin) for pin in pins),
        home=HF_HOME,
        command=f"[{between.join(json.dumps(word) for word in command)}]",
    )


def _command(models: Sequence[str], script: str = "") -> list[str]:
    start = ["sh", script, MODELS] if script else ["tritonserver", f"--model-repository={MODELS}"]
    only = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in models)]
    return [*start, *(only if models else ()), *closed(explicit=bool(models))]


KEY_HEADER = "llmserve-key"
# No request can carry a line break in a header.
_NOBODYS_KEY = "no\nkey"


def closed(*, explicit: bool, key: str = _NOBODYS_KEY) -> list[str]:
    """Return the words that close what would change the server to whoever has not the key.

    Tracing and logging can be made to write files; through shared memory, versions before 25.07
    could be made to run code, and by loading a model every version can. So models are loaded on
    request only where that was asked for (``explicit``).
    """
    what = "shared-memory,trace,logging" + (",model-repository" if explicit else "")
    what += f":{KEY_HEADER}={key}"
    return [f"--http-restricted-api={what}", f"--grpc-restricted-protocol={what}"]


def _loaded(models: Mapping[str, Manifest | None]) -> list[str]:
    """Name models in the order in which they are loaded: an ensemble's parts before it."""
    return [
        part
        for name, manifest in sorted(models.items())
        for part in (*(manifest.parts if manifest else ()), name)
    ]


def docker_build(repository: Path, name: str, image: str | None) -> str:
    """Return the command that makes the image: of a repository, or of one of its models."""
    own = f" -f {shlex.quote(str(repository / name / FILE))}" if name else ""
    asked = " --build-arg IMAGE=..." if image is None else ""
    return f"docker build -t {image_of(name)}{own}{asked} {shlex.quote(str(repository))}"


def served_by(repository: Path, models: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return what the image is called that serves these models, and what it is to load.

    Without ``models`` it is the repository's own, and loads all that it can: where that is
    everything, nothing is named. An image of the user's own is taken to serve all of them.
    """
    found = manifests_of(repository, patient=True)
    served, others = groups(found)
    if not others or _is_users(repository / FILE):
        return IMAGE, tuple(models)
    if not models:
        return IMAGE, tuple(_loaded(served))
    asked = {name: manifest for name in models if (manifest := found.get(name))}
    own = [name for name in models if name in others]
    if len({manifest.image for manifest in asked.values()}) > 1:
        raise UsageError(
            f"{' and '.join(asked)} need different images", mend=f"serve one: --model {own[0]}"
        )
    return image_of(own[0] if own else ""), tuple(models)


def docker_run(repository: Path, name: str = "") -> str:
    """Return the command that serves the repository, or one model of it with an image of its
    own, from the container: on loopback only."""
    ports = " ".join(f"-p 127.0.0.1:{port}:{port}" for port in (8000, 8001, 8002))
    mounts = [f"{repository.absolute()}:{MODELS}:ro"]
    mounts += [f"{path}:{path}:ro" for path in references(repository)]
    volumes = " ".join(f"-v {shlex.quote(mount)}" for mount in mounts)
    # The token goes by its name: its value stays in the environment.
    return (
        f"docker run --rm --gpus all --shm-size 1g {ports} -e HF_TOKEN "
        f'-v "${{HF_HOME:-$HOME/.cache/huggingface}}:{HF_HOME}" {volumes} {image_of(name)}'
    )
