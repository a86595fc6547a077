"""Dockerfiles: of a repository, and of a model that the repository's cannot serve."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmserve.errors import ConfigError, OutputError, UsageError
from llmserve.repository.manifest import Manifest, references

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


@dataclass(frozen=True)
class Needs:
    """What a model needs; ``image`` is None where it is not known which one would do.

    ``parts`` are the models that have to be loaded before it. One that llmserve did not build is
    not ``known``: it goes wherever the others go.
    """

    packages: Mapping[str, str] = field(default_factory=dict)
    image: str | None = PLAIN
    brought: Sequence[str] = ()
    parts: Sequence[str] = ()
    known: bool = True

    @classmethod
    def of(cls, manifest: Manifest | None) -> Needs | None:
        """Read a manifest; None for a part, whose needs are those of the model it is part of."""
        if manifest is None:
            return cls(known=False)
        if manifest.part_of:
            return None
        return cls(manifest.packages, manifest.image, manifest.brought, manifest.parts)


def needs_of(
    repository: Path, *, without: Collection[str] = (), patient: bool = False
) -> dict[str, Needs]:
    """Return the needs of all models of a repository; ``patient`` takes a damaged manifest for
    none."""
    found = {}
    for folder in sorted(repository.iterdir()) if repository.is_dir() else ():
        if folder.name in without or folder.name.startswith(".") or not folder.is_dir():
            continue
        try:
            needs = Needs.of(Manifest.read(folder))
        except ConfigError:
            if not patient:
                raise
            needs = Needs(known=False)
        if needs:
            found[folder.name] = needs
    return found


def groups(models: Mapping[str, Needs]) -> tuple[dict[str, Needs], dict[str, Needs]]:
    """Return the models that the repository's image serves, and the others.

    Where they need different images it serves those of the plain one, which have no Dockerfile of
    their own; where there are none of these, those of the image whose name sorts last, which is
    NVIDIA's newest.
    """
    images = {needs.image for needs in models.values() if needs.known}
    chosen = PLAIN if PLAIN in images else max(images, key=lambda image: image or "", default=PLAIN)
    served = {
        name: needs for name, needs in models.items() if needs.image == chosen or not needs.known
    }
    return served, {name: needs for name, needs in models.items() if name not in served}


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
    built: Mapping[str, Needs | None],
    *,
    newest: str,
    gone: Collection[str] = (),
) -> str | None:
    """Return the Dockerfile that a repository gets with models that have these needs.

    None stands for the part of another model. ``gone`` are models that this build takes away.
    The file lies in the repository's folder, where Triton overlooks files, so that it travels
    with the models. One that lost its first line is the user's own and stays: that is None.
    """
    if _is_users(repository / FILE):
        return None
    # What is replaced may be damaged; a neighbour may not, for its packages are not known.
    neighbours = needs_of(repository, without={*built, *gone})
    ours = {name: needs for name, needs in built.items() if needs}
    return of_repository({**neighbours, **ours}, newest)


def _is_users(path: Path) -> bool:
    try:
        # As bytes, since a file of the user's own may be in any encoding.
        return path.exists() and not path.read_bytes().startswith(_MARK.encode())
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from None


def of_repository(models: Mapping[str, Needs], newest: str) -> str:
    """Return a Dockerfile that serves models, as many of them as one image can.

    One container has one version of a package: that of the newest model, for an upgrade has to
    begin with one of them. Models built with another are named in a comment, and so are those
    that need another image: each of these has a Dockerfile of its own.
    """
    served, others = groups(models)
    pins: dict[str, str] = {}
    for name in sorted(served, key=lambda name: (name == newest, name)):
        pins |= served[name].packages
    notes = [
        f"# {name} was built with {package} {version}: build it again."
        for name in sorted(served)
        for package, version in sorted(served[name].packages.items())
        if pins[package] != version
    ]
    for name, needs in sorted(others.items()):
        notes += [
            f"# {name} is not served by this image: it needs {needs.image or 'another'}.",
            f"#     {docker_build(Path(), name, needs)}",
        ]
    image = next((needs.image for needs in served.values() if needs.known), PLAIN)
    brought = [package for needs in served.values() for package in needs.brought]
    needs = Needs(pins, image, brought)
    build = docker_build(Path(), "", needs)
    return _written([_MARK], build, needs, notes, _command(_loaded(served) if others else ()))


def of_model(name: str, needs: Needs, folder: Path) -> str:
    """Return the Dockerfile of a model that needs an image of its own."""
    head = [
        f"# {name} in an image that has what it needs: nothing that this brings is replaced, and",
        "# no other model of the repository is loaded.",
    ]
    # An engine of several processes is started by a script, which takes the same words.
    script = f"{MODELS}/{name}/{LAUNCH_SCRIPT}" if (folder / LAUNCH_SCRIPT).is_file() else ""
    command = _command(_loaded({name: needs}), script)
    return _written(head, docker_build(Path(), name, needs), needs, (), command)


def _written(
    head: Sequence[str], build: str, needs: Needs, notes: Sequence[str], command: Sequence[str]
) -> str:
    pins = [f"{name}=={needs.packages[name]}" for name in sorted(needs.packages)
            if name not in needs.brought]  # fmt: skip
    # By its variable, which a pip that is too old for the option passes over.
    pip = "PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir"
    between = ", \\\n     " if len(command) > 2 else ", "
    return _TEXT.format(
        head="\n".join(head),
        build=build,
        build_with=f"{build.removesuffix(' .')} --build-context wheels=DIR .",
        argument="" if needs.image is not None else _ASKED,
        image="${IMAGE}" if needs.image is None else needs.image or BASE_IMAGE,
        notes="".join(f"{line}\n" for line in notes),
        # An image that brings its own keeps it, whatever a package says that it depends on.
        pip=pip if needs.image == PLAIN else f"{pip} --no-deps",
        packages=" \\\n        ".join(shlex.quote(pin) for pin in pins),
        home=HF_HOME,
        command=f"[{between.join(json.dumps(word) for word in command)}]",
    )


# Whoever could load a model could run code. No request can carry a line break in a header.
_NOBODYS_KEY = "llmserve-key=no\nkey"


def _command(models: Sequence[str], script: str = "") -> list[str]:
    start = ["sh", script, MODELS] if script else ["tritonserver", f"--model-repository={MODELS}"]
    only = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in models)]
    closed = f"shared-memory,trace,logging{',model-repository' if models else ''}:{_NOBODYS_KEY}"
    keys = [f"--http-restricted-api={closed}", f"--grpc-restricted-protocol={closed}"]
    return [*start, *(only if models else ()), *keys]


def _loaded(models: Mapping[str, Needs]) -> list[str]:
    """Name models in the order in which they are loaded: an ensemble's parts before it."""
    return [part for name in sorted(models) for part in (*models[name].parts, name)]


def docker_build(repository: Path, name: str, needs: Needs) -> str:
    """Return the command that makes the image: of a repository, or of one of its models."""
    own = f" -f {shlex.quote(str(repository / name / FILE))}" if name else ""
    asked = " --build-arg IMAGE=..." if needs.image is None else ""
    return f"docker build -t {image_of(name)}{own}{asked} {shlex.quote(str(repository))}"


def served_by(repository: Path, models: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return what the image is called that serves these models, and what it is to load.

    Without ``models`` it is the repository's own, and loads all that it can: where that is
    everything, nothing is named. An image of the user's own is taken to serve all of them.
    """
    found = needs_of(repository, patient=True)
    served, others = groups(found)
    if not others or _is_users(repository / FILE):
        return IMAGE, tuple(models)
    if not models:
        return IMAGE, tuple(_loaded(served))
    asked = {name: found[name] for name in models if name in found and found[name].known}
    own = [name for name in models if name in others]
    if len({needs.image for needs in asked.values()}) > 1:
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
