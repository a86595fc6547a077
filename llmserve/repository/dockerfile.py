"""Dockerfiles of repositories, and of models that need another image than the repository's."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmserve.contract.container import (
    BASE_IMAGE,
    DOCKERFILE,
    GRPC_PORT,
    HF_HOME,
    HTTP_PORT,
    LAST_RELEASES,
    LAUNCH_SCRIPT,
    LOOPBACK,
    METRICS_PORT,
    MODELS,
    PLAIN,
    ULIMITS,
    Release,
    addresses,
    base_of,
    closed,
    image_of,
    python_in,
    release,
    release_in,
    select,
    start,
    triton_of,
)
from llmserve.errors import OutputError, UsageError
from llmserve.packages import OLD_NUMPY, runs_with
from llmserve.repository.manifest import Manifest
from llmserve.repository.repository import Repository
from llmserve.repository.wheels import Wheels, sources, wheels_in, wrapped
from llmserve.runtime import own_packages

_SELECTED = "/selected"
"""The path of links to the models that an image serves, if it does not serve them all."""


def manifests_of(
    repository: Repository, *, without: Collection[str] = ()
) -> dict[str, Manifest | None]:
    """Return the manifests of a repository's models, except those of parts of models.

    A model that llmserve did not build, or whose manifest is damaged, has None: it is served
    together with the others.
    """
    return {
        model.name: model.manifest
        for model in repository
        if not (model.part_of or model.name in without or model.name.startswith("."))
    }


def groups(
    models: Mapping[str, Manifest | None],
) -> tuple[dict[str, Manifest | None], dict[str, Manifest]]:
    """Return the models that the repository's image serves, and the others.

    If some need an image of their own, it is based on the one whose name sorts last, which is
    NVIDIA's newest: models of the plain image are served from it too, with packages of their own.
    But images with an engine have no other backends than the engine's and Python's: a model that
    needs one keeps the plain image. So does one whose packages the image's Python cannot have.
    """
    manifests = [manifest for manifest in models.values() if manifest]
    images = {manifest.image for manifest in manifests}
    chosen = max(filter(None, images), default=None if images == {None} else PLAIN)
    plain = [manifest for manifest in manifests if manifest.image == PLAIN]
    if any(manifest.backends or misfit(manifest, chosen) for manifest in plain):
        chosen = PLAIN
    others = {name: m for name, m in models.items() if m and m.image not in (chosen, PLAIN)}
    return {name: m for name, m in models.items() if name not in others}, others


def misfit(manifest: Manifest, image: str | None) -> str:
    """Return a package of a model that the image's Python cannot have; empty if there is none."""
    python = python_in(image)
    lasts = _lasts(python)
    unfit = (name for name in sorted(manifest.pythons) if not _runs(manifest, name, python))
    return next((name for name in unfit if name not in (*lasts, *manifest.brought)), "")


def _lasts(python: str) -> Mapping[str, str]:
    return LAST_RELEASES.get(python.rpartition(".")[0], {})


def _runs(manifest: Manifest, package: str, python: str) -> bool:
    return not python or runs_with(manifest.pythons.get(package, ""), python)


def base_image(served: Mapping[str, Manifest | None]) -> str | None:
    """Return the image on which models can be served together is based; None if it is not known."""
    images = [manifest.image for manifest in served.values() if manifest]
    return next((image for image in images if image != PLAIN), PLAIN)


def _triton(image: str | None, models: Iterable[Manifest | None]) -> Release:
    """Return the Triton in an image, at least that which all models that need it are sure of."""
    tritons = {m.triton for m in models if m and m.image is None}
    if image is not None or not tritons or "" in tritons:
        return triton_of(image)
    return release(min(tritons))


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
    repository: Repository,
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
    if _users_own(repository.path / DOCKERFILE) is not None:
        return None
    # Replaced models may be damaged; others may not, because their packages would be unknown.
    others = manifests_of(repository, without={*built, *removed})
    for name in others:
        repository.models[name].intact()
    new = {name: m for name, m in built.items() if not (m and m.part_of)}
    models = {**others, **new}
    if not any(models.values()):
        return ""
    wheels = wheels or {}
    names = {name for name, _ in wheels}
    kept = {key: file for key, file in wheels_in(repository.path).items() if key[0] not in names}
    return of_repository(models, newest, {**kept, **wheels})


def _users_own(path: Path) -> str | None:
    """Return the text of a Dockerfile that is the user's own; None if there is none."""
    try:
        # Read as bytes, since a user's file may have any encoding.
        content = path.read_bytes() if path.exists() else _MARK.encode()
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from None
    return None if content.startswith(_MARK.encode()) else content.decode(errors="replace")


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
    pins, notes = _pins(engines, newest, image)
    own_pins, own_notes = _pins(guests, newest, image)
    notes += own_notes
    for name, manifest in sorted(others.items()):
        notes += [
            f"# {name} is not served by this image: it needs {manifest.image or 'another'}.",
            f"#     {docker_build(Path(), name, manifest.image)}",
        ]
    own_models = _load_order(guests)
    triton = _triton(image, built.values())
    steps = _Steps(image, triton, pins, own_pins, own_models, wheels or {})
    # An engine of several processes is started by a script, which accepts the same arguments.
    scripts = [name for name, manifest in built.items() if LAUNCH_SCRIPT in manifest.files]
    if scripts[1:]:
        names = " and ".join(scripts)
        notes.append(f"# {names} each need their own image: build with -f NAME/{DOCKERFILE}.")
    selected = _load_order(served) if others else []
    command = _command(triton, scripts[0] if scripts else "", selected=bool(selected))
    notes += [_select(selected)] if selected else []
    return _render([_MARK], docker_build(Path(), "", image), DOCKERFILE, steps, notes, command)


def of_model(name: str, manifest: Manifest, folder: Path, wheels: Wheels | None = None) -> str:
    """Return the Dockerfile of a model that needs its own image."""
    head = [
        f"# Serves {name} alone, from an image with what it needs: none of the image's packages is",
        "# replaced, and no other model of the repository is loaded.",
    ]
    engine = name if (folder / LAUNCH_SCRIPT).is_file() else ""
    triton = _triton(manifest.image, [manifest])
    command = _command(triton, engine, selected=True)
    build = docker_build(Path(), name, manifest.image)
    pins, notes = _pins({name: manifest}, name, manifest.image)
    steps = _Steps(manifest.image, triton, pins, {}, (), wheels or {})
    notes.append(_select(_load_order({name: manifest})))
    return _render(head, build, f"{name}/{DOCKERFILE}", steps, notes, command)


Pin = tuple[str, str]
"""A package's version, and where that comes from if it is no index."""


def _pins(
    built: Mapping[str, Manifest], newest: str, image: str | None
) -> tuple[dict[str, Pin], list[str]]:
    """Return the packages that models need together, and a note for each that has to give way."""
    pins: dict[str, Pin] = {}
    python = python_in(image)
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
    pins = {name: pin for name, pin in pins.items() if name not in brought}
    for name, last in _lasts(python).items():
        if name in pins and not all(_runs(manifest, name, python) for manifest in built.values()):
            notes.append(
                f"# {name} {last} is the last for the Python {python} of this image, and models "
                f"were built with {pins[name][0]}."
            )
            pins[name] = (last, "")
    return pins, notes


@dataclass(frozen=True)
class _Steps:
    """What an image is based on and what is installed in it."""

    image: str | None
    triton: Release
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
        text = self._run("", self.pins, without_dependencies=self.image != PLAIN)
        if self.own_pins:
            names = "\n".join(f"# {line}" for line in wrapped(self.own_models))
            text += f"# Packages of these models only; the image's own stay:\n{names}\n"
            text += self._run(f"--target {_OWN_PACKAGES} ", self.own_pins)
            text += _OWN.format(
                packages=f"{own_packages.PACKAGES}={_OWN_PACKAGES}",
                models=f'{own_packages.MODELS}="{" ".join(self.own_models)}"',
                module=own_packages.__name__,
            )
        return text

    def _run(
        self, options: str, pins: Mapping[str, Pin], *, without_dependencies: bool = False
    ) -> str:
        options += "--no-deps " if without_dependencies else ""
        requirements = []
        for name, (version, origin) in sorted(pins.items()):
            if wheel := self.wheels.get((name, version)):
                requirements.append(f"/wheels/{wheel}")
            elif name != "numpy":
                requirements.append(f"{name} @ {origin}" if origin else f"{name}=={version}")
        if not without_dependencies or "numpy" in pins:
            # As in NVIDIA's images: Triton before 24.11 reads no texts with numpy 2.
            requirements.append(OLD_NUMPY)
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


def _render(
    head: Sequence[str],
    build: str,
    file: str,
    steps: _Steps,
    notes: Sequence[str],
    command: Sequence[str],
) -> str:
    image = steps.image
    if not steps.triton.closes:
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


def _command(triton: Release, engine: str, *, selected: bool) -> list[str]:
    models = _SELECTED if selected else MODELS
    words = start(models, engine=engine, repository=MODELS)
    return [*words, *addresses(triton), *closed(triton)]


def _select(models: Sequence[str]) -> str:
    separate_lines = select(models, _SELECTED).replace(f" {MODELS}/", f" \\\n        {MODELS}/")
    return f"RUN {separate_lines}"


def _load_order(models: Mapping[str, Manifest | None]) -> list[str]:
    """Return the names of models in loading order: a model's parts before itself."""
    return [
        part
        for name, manifest in sorted(models.items())
        for part in (*(manifest.parts if manifest else ()), name)
    ]


def docker_build(repository: Path, name: str, image: str | None) -> str:
    """Return the command that builds the image of a repository, or of one of its models."""
    file = f" -f {shlex.quote(str(repository / name / DOCKERFILE))}" if name else ""
    argument = " --build-arg IMAGE=..." if image is None else ""
    return f"docker build -t {image_of(name)}{file}{argument} {shlex.quote(str(repository))}"


@dataclass(frozen=True)
class Image:
    """An image that a Dockerfile of a repository builds, and what it serves."""

    repository: Repository
    owner: str
    """The model that has an image of its own; empty for the repository's."""
    base: str | None
    """The image on which it is based; None if that is not known."""
    triton: Release
    models: tuple[str, ...]
    """The models to load; empty for all."""

    @property
    def name(self) -> str:
        return image_of(self.owner)

    @property
    def dockerfile(self) -> Path:
        return self.repository.path / self.owner / DOCKERFILE

    @property
    def build(self) -> str:
        """The command that builds it."""
        return docker_build(self.repository.path, self.owner, self.base)

    @property
    def run(self) -> str:
        """The command that serves its models from the container, on loopback only."""
        return docker_run(self.repository, self.owner, self.triton)


def image_for(repository: Repository, models: Sequence[str]) -> Image:
    """Return the image that serves these models; raise if none serves them all.

    Without ``models``, it is the repository's image with all the models that it can serve. A user's
    own image is assumed to serve every model, with the Triton that its Dockerfile names.
    """
    own = _users_own(repository.path / DOCKERFILE)
    if own is not None:
        named = base_of(own)
        return Image(repository, "", named or None, release_in(named), tuple(models))
    served, others = groups(manifests_of(repository))
    separate = [name for name in models if name in others]
    together = [name for name in models if name in served]
    if separate and (together or len({others[name].image for name in separate}) > 1):
        names = " and ".join(name for name in models if name in {**served, **others})
        raise UsageError(f"{names} need different images", hint=f"serve one: --model {separate[0]}")
    owner = separate[0] if separate else ""
    base = others[owner].image if owner else base_image(served)
    if others and not models:
        models = _load_order(served)
    triton = _triton(base, [others[owner]] if owner else served.values())
    return Image(repository, owner, base, triton, tuple(models))


def docker_run(repository: Repository, name: str, triton: Release) -> str:
    """Return the command that serves the repository, or a model with its own image."""
    numbers = (HTTP_PORT, GRPC_PORT, METRICS_PORT)
    ports = " ".join(f"-p {LOOPBACK}:{port}:{port}" for port in numbers)
    if not triton.closes:
        # It listens on loopback, which is the container's own unless it has the machine's network.
        ports = "--network host"
    mounts = [f"{repository.path.absolute()}:{MODELS}:ro"]
    mounts += [f"{path}:{path}:ro" for path in repository.references()]
    volumes = " ".join(f"-v {shlex.quote(mount)}" for mount in mounts)
    limits = " ".join(f"--ulimit {name}={value}" for name, value in ULIMITS.items())
    # Only the token's variable is named: its value stays in the environment.
    return (
        f"docker run --rm --gpus all --shm-size 1g {limits} {ports} -e HF_TOKEN "
        f'-v "${{HF_HOME:-$HOME/.cache/huggingface}}:{HF_HOME}" {volumes} {image_of(name)}'
    )
