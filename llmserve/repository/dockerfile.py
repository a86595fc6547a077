"""Dockerfiles of repositories, and of models that need another image than the repository's."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
from llmserve.repository.wheels import Wheels, wheels_in, without_index
from llmserve.runtime import own_packages

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

ULIMITS = {"memlock": -1, "stack": 64 << 20}
"""The limits with which NVIDIA's pages start containers: engines pin memory that GPUs read."""


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

    If some need an image of their own, it is based on the one whose name sorts last, which is
    NVIDIA's newest: models of the plain image are served from it too, with packages of their own.
    But images with an engine have no other backends than the engine's and Python's: a model that
    needs one keeps the plain image.
    """
    manifests = [manifest for manifest in models.values() if manifest]
    images = {manifest.image for manifest in manifests}
    chosen = max(filter(None, images), default=None if images == {None} else PLAIN)
    if any(manifest.backends for manifest in manifests if manifest.image == PLAIN):
        chosen = PLAIN
    others = {name: m for name, m in models.items() if m and m.image not in (chosen, PLAIN)}
    return {name: m for name, m in models.items() if name not in others}, others


def base_image(served: Mapping[str, Manifest | None]) -> str | None:
    """Return the image on which models can be served together is based; None if it is not known."""
    images = [manifest.image for manifest in served.values() if manifest]
    return next((image for image in images if image != PLAIN), PLAIN)


FILE = "Dockerfile"
_MARK = (
    "# Written by `llmserve build`, and again by the next; take this line out to keep your edits."
)
_TEXT = """{head}
#
#     {build}
#
{sources}

{argument}FROM {image}
{notes}# This file too, since a pattern that matches nothing is an error on its own.
COPY {file} *.whl /wheels/
{installs}ENV HF_HOME={home}
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
    wheels: Wheels | None = None,
) -> str | None:
    """Return the Dockerfile of a repository with these newly built models.

    ``removed`` are models that this build removes, ``wheels`` those that it adds. The file is in
    the repository's folder, where Triton ignores files, so that it is copied with the models. A
    file without our first line is the user's own and stays: the result is None. It is empty if no
    model is left that llmserve built.
    """
    if _is_user_owned(repository / FILE):
        return None
    # Replaced models may be damaged; others may not, because their packages would be unknown.
    others = manifests_of(repository, without={*built, *removed})
    new = {name: m for name, m in built.items() if not (m and m.part_of)}
    models = {**others, **new}
    if not any(models.values()):
        return ""
    wheels = wheels or {}
    names = {name for name, _ in wheels}
    kept = {key: file for key, file in wheels_in(repository).items() if key[0] not in names}
    return of_repository(models, newest, {**kept, **wheels})


def _is_user_owned(path: Path) -> bool:
    try:
        # Read as bytes, since a user's file may have any encoding.
        return path.exists() and not path.read_bytes().startswith(_MARK.encode())
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from None


def of_repository(
    models: Mapping[str, Manifest | None], newest: str, wheels: Wheels | None = None
) -> str:
    """Return a Dockerfile that serves as many of the models as one image can.

    A container has one version of each package: that of the newest model, because an upgrade must
    start with one model. Models built with other versions are named in a comment, and so are those
    that need another image; each of these has its own Dockerfile. In an image of an engine, models
    that do not need it have packages of their own.
    """
    served, others = groups(models)
    built = {name: manifest for name, manifest in sorted(served.items()) if manifest}
    image = base_image(served)
    engines = {name: m for name, m in built.items() if m.image == image}
    guests = {name: m for name, m in built.items() if m.image != image}
    pins, notes = _pins(engines, newest)
    own_pins, own_notes = _pins(guests, newest)
    notes += own_notes
    for name, manifest in sorted(others.items()):
        notes += [
            f"# {name} is not served by this image: it needs {manifest.image or 'another'}.",
            f"#     {docker_build(Path(), name, manifest.image)}",
        ]
    own_models = _load_order(guests)
    steps = _Steps(image, pins, own_pins, own_models, wheels or {})
    # An engine of several processes is started by a script, which accepts the same arguments.
    scripts = [name for name, manifest in built.items() if LAUNCH_SCRIPT in manifest.files]
    if scripts[1:]:
        names = " and ".join(scripts)
        notes.append(f"# {names} each need their own image: build with -f NAME/{FILE}.")
    script = f"{MODELS}/{scripts[0]}/{LAUNCH_SCRIPT}" if scripts else ""
    selected = _load_order(served) if others else []
    command = _command(image, script, selected=bool(selected))
    notes += [_select(selected)] if selected else []
    return _render([_MARK], docker_build(Path(), "", image), FILE, steps, notes, command)


def of_model(name: str, manifest: Manifest, folder: Path, wheels: Wheels | None = None) -> str:
    """Return the Dockerfile of a model that needs its own image."""
    head = [
        f"# Serves {name} alone, from an image with what it needs: none of the image's packages is",
        "# replaced, and no other model of the repository is loaded.",
    ]
    script = f"{MODELS}/{name}/{LAUNCH_SCRIPT}" if (folder / LAUNCH_SCRIPT).is_file() else ""
    command = _command(manifest.image, script, selected=True)
    build = docker_build(Path(), name, manifest.image)
    steps = _Steps(manifest.image, _pins({name: manifest}, name)[0], {}, (), wheels or {})
    notes = [_select(_load_order({name: manifest}))]
    return _render(head, build, f"{name}/{FILE}", steps, notes, command)


Pin = tuple[str, str]
"""A package's version, and where that comes from if it is no index."""


def _pins(built: Mapping[str, Manifest], newest: str) -> tuple[dict[str, Pin], list[str]]:
    """Return the packages that models need together, and a note for each that has to give way."""
    pins: dict[str, Pin] = {}
    for name in sorted(built, key=lambda name: (name == newest, name)):
        manifest = built[name]
        pins |= {
            n: (version, manifest.origins.get(n, "")) for n, version in manifest.packages.items()
        }
    notes = [
        f"# {name} was built with {package} {version}: build it again."
        for name, manifest in sorted(built.items())
        for package, version in sorted(manifest.packages.items())
        if pins[package][0] != version
    ]
    brought = {package for manifest in built.values() for package in manifest.brought}
    return {name: pin for name, pin in pins.items() if name not in brought}, notes


@dataclass(frozen=True)
class _Steps:
    """What an image is based on and what is installed in it."""

    image: str | None
    pins: Mapping[str, Pin]
    own_pins: Mapping[str, Pin]
    own_models: Sequence[str]
    """The models that use the packages of ``own_pins``, which no other model sees."""
    wheels: Wheels

    def sources(self) -> str:
        versions = {name: version for name, (version, _) in {**self.pins, **self.own_pins}.items()}
        return sources(versions, self.wheels, "llmserve build --vendor")

    def installs(self) -> str:
        # Dependencies must not replace packages of an image other than the plain one.
        option = "" if self.image == PLAIN else "--no-deps "
        text = self._run(option, self.pins)
        if self.own_pins:
            names = "\n".join(f"# {line}" for line in _wrapped(self.own_models))
            text += f"# Packages of these models only; the image's own stay:\n{names}\n"
            text += self._run(f"--target {_OWN_PACKAGES} ", self.own_pins)
            text += _OWN.format(
                packages=f"{own_packages.PACKAGES}={_OWN_PACKAGES}",
                models=f'{own_packages.MODELS}="{" ".join(self.own_models)}"',
                module=own_packages.__name__,
            )
        return text

    def _run(self, options: str, pins: Mapping[str, Pin]) -> str:
        requirements = []
        for name, (version, origin) in sorted(pins.items()):
            if wheel := self.wheels.get((name, version)):
                requirements.append(f"/wheels/{wheel}")
            else:
                requirements.append(f"{name} @ {origin}" if origin else f"{name}=={version}")
        needs_git = any(" @ git+" in requirement for requirement in requirements)
        words = " \\\n        ".join(map(shlex.quote, requirements))
        command = f"{_PIP} {options}--find-links /wheels \\\n        {words}\n"
        return f"RUN {_GIT if needs_git else ''}{command}"


_OWN_PACKAGES = "/opt/llmserve/packages"
# Set as a variable, because a pip that is too old for the option ignores it.
_PIP = "PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir"
_GIT = """\
command -v git >/dev/null || { apt-get update \\
        && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*; }
RUN """
# Python reads such a file when it starts, before a model imports anything.
_OWN = """\
ENV {packages} {models}
RUN python3 -c "import pathlib, site; \\
        pathlib.Path(site.getsitepackages()[0], 'llmserve.pth').write_text( \\
        'import {module} as own; own.use()')"
"""


def sources(versions: Mapping[str, str], wheels: Wheels, command: str) -> str:
    """Return a comment that says where packages come from; the command brings their wheels."""
    here = [name for name, version in versions.items() if (name, version) in wheels]
    missing = without_index(sorted(versions.keys() - set(here)))
    lines = []
    if here:
        lines += ["Installed from the wheels beside this file:", *_wrapped(here)]
    if missing:
        lines += ["Installed here from a folder, which no image has:", *_wrapped(missing)]
        lines += ["Unless an index has them, put their wheels beside this file:"]
        lines += [f"`{command}` does."]
    lines += ["All others come from an index." if lines else "All packages come from an index."]
    return "\n".join(f"# {line}" for line in lines)


def _wrapped(names: Collection[str]) -> list[str]:
    return textwrap.wrap(
        ", ".join(sorted(names)), 90, initial_indent="    ", subsequent_indent="    "
    )


def _render(
    head: Sequence[str],
    build: str,
    file: str,
    steps: _Steps,
    notes: Sequence[str],
    command: Sequence[str],
) -> str:
    image = steps.image
    if not triton_of(image).closes:
        notes = [*notes, *_OPEN]
    separator = ", \\\n     " if len(command) > 2 else ", "
    return _TEXT.format(
        head="\n".join(head),
        build=build,
        sources=steps.sources(),
        argument="" if image is not None else _IMAGE_ARGUMENT,
        image="${IMAGE}" if image is None else image or BASE_IMAGE,
        notes="".join(f"{line}\n" for line in notes),
        file=file,
        installs=steps.installs(),
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
    separate = [name for name in models if name in others]
    together = [name for name in models if name in served]
    if separate and (together or len({others[name].image for name in separate}) > 1):
        names = " and ".join(name for name in models if name in manifests)
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
    limits = " ".join(f"--ulimit {name}={value}" for name, value in ULIMITS.items())
    # Only the token's variable is named: its value stays in the environment.
    return (
        f"docker run --rm --gpus all --shm-size 1g {limits} {ports} -e HF_TOKEN "
        f'-v "${{HF_HOME:-$HOME/.cache/huggingface}}:{HF_HOME}" {volumes} {image_of(name)}'
    )
