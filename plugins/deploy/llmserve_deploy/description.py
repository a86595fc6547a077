"""The description of a deployment, from which every file is rendered."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve.contract.container import (
    GRPC_PORT,
    HTTP_PORT,
    IMAGE,
    METRICS_PORT,
    MODELS,
    UNKNOWN,
    Release,
    addresses,
    closed,
    release_in,
    select,
    start,
)
from llmserve.errors import ConfigError, UsageError
from llmserve.plugin import Model, Repository, Wheels, image_for, near

GATEWAY_PORT = 8080
KEYS_FILE = "keys.json"
KEYS_FOLDER = "/run/secrets/llmserve"
_SELECTED = "/tmp/selected"
"""Links to the models that Triton serves, in a folder that it may write to."""
SHARED_MEMORY = "1Gi"
"""Triton's Python backend moves tensors through shared memory."""
USER = 1000
"""User id of the processes: ``triton-server`` in NVIDIA's images, ``llmserve`` in the gateway's."""
LOAD_SECONDS = 1800
"""How long models may take to load, including a download from the hub."""
LEAVE_SECONDS = 15
"""Time until no client sends requests to a terminating pod any more."""
SPARE_SECONDS = 15
"""Time for Triton to stop after the gateway has stopped."""

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_CLAIM = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_CPUS = re.compile(r"[1-9][0-9]*m?|[0-9]+\.[0-9]+")
# Without a unit it would be bytes.
_MEMORY = re.compile(r"[1-9][0-9]*(\.[0-9]+)?[MGT]i?")
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]*")


@dataclass(frozen=True)
class Deployment:
    """A gateway with its Triton, once per replica."""

    repository: Path
    image: str
    """Triton's image, which contains the models unless they are on a volume."""
    built_image: str
    """The image that the repository's Dockerfile builds, with packages but without models."""
    build: str
    """The command that builds ``built_image``."""
    models: tuple[str, ...]
    """The models to offer; empty for all."""
    folders: tuple[str, ...]
    """The models and their parts, in the order in which Triton loads them."""
    triton: Release
    """The Triton in the image."""
    script: str
    """The model whose own script starts Triton, if it needs several processes."""
    references: tuple[str, ...]
    """Folders outside the repository that models need."""
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The tensors for the text in and out of models that others wrote, by the models' names."""
    name: str = "llmserve"
    gateway_image: str = "llmserve-gateway"
    replicas: int = 2
    max_replicas: int = 0
    gpus: int = 0
    cpus: str = "2"
    memory: str = "8Gi"
    concurrency: int = 32
    grace: int = 30
    volume: str = ""
    """The claim for a volume with the repository; without it the image contains the models."""
    no_auth: bool = False
    wheels: Wheels = field(default_factory=dict)
    """The wheels beside the files."""
    open_metrics: bool = False
    """Whether the gateway serves its metrics without a key."""

    def __post_init__(self) -> None:
        """Refuse values that Kubernetes or Docker would refuse later, or misinterpret."""
        for option, value, pattern, hint in (
            ("--name", self.name, _NAME, "use up to 40 of a-z, 0-9 and -, a letter first"),
            ("--image", self.image, _IMAGE, "use e.g. registry.example/llm/models:1"),
            ("--gateway-image", self.gateway_image, _IMAGE, "use e.g. registry.example/gateway:1"),
            ("--cpus", self.cpus, _CPUS, "use e.g. 2 or 500m"),
            ("--memory", self.memory, _MEMORY, "use e.g. 8Gi"),
            ("--volume", self.volume or "none", _CLAIM, "use the name of a PersistentVolumeClaim"),
        ):
            if not pattern.fullmatch(value):
                raise UsageError(f"{option} cannot be {value!r}", hint=hint)
        if 0 < self.max_replicas < self.replicas:
            raise UsageError(
                f"--max-replicas {self.max_replicas} is less than --replicas {self.replicas}",
                hint="raise it, or leave it out for twice --replicas",
            )

    @property
    def scrapes_by_key(self) -> bool:
        return not (self.no_auth or self.open_metrics)

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or 2 * self.replicas

    @property
    def keys_secret(self) -> str:
        return f"{self.name}-keys"

    @property
    def metrics_secret(self) -> str:
        """The secret with the key that Prometheus uses."""
        return f"{self.name}-metrics"

    @property
    def hub_secret(self) -> str:
        return f"{self.name}-hub"

    @property
    def termination_seconds(self) -> int:
        return LEAVE_SECONDS + self.grace + SPARE_SECONDS

    def triton_command(self, models: str = MODELS, host: str = "") -> list[str]:
        """Return the command that starts Triton on a folder of models, on one address or all."""
        selects = bool(self.models or self.texts)
        served = _SELECTED if selects else models
        words = start(served, engine=self.script, repository=models)
        words += addresses(self.triton, host)
        ports = (("http", HTTP_PORT), ("grpc", GRPC_PORT), ("metrics", METRICS_PORT))
        words += [f"--{protocol}-port={port}" for protocol, port in ports]
        words += [f"--exit-timeout-secs={self.grace}", *closed(self.triton)]
        if not selects:
            return words
        links = select(self.folders, served, models, self.texts)
        return ["sh", "-c", f"{links} && exec {shlex.join(words)}"]

    def gateway_command(self, triton: str) -> list[str]:
        """Return the command that starts the gateway for a Triton at this address."""
        words = ["llmserve", "gateway", "--url", f"grpc://{triton}:{GRPC_PORT}"]
        words += ["--triton-metrics", f"http://{triton}:{METRICS_PORT}/metrics"]
        words += ["--host", "0.0.0.0", "--port", str(GATEWAY_PORT)]  # noqa: S104
        words += ["--grace", str(self.grace), "--max-requests", str(self.concurrency)]
        words += [word for name in self.models for word in ("--model", name)]
        return [
            *words,
            *(["--open-metrics"] if self.open_metrics else []),
            *(["--no-auth"] if self.no_auth else ["--keys", f"{KEYS_FOLDER}/{KEYS_FILE}"]),
        ]


def describe(
    repository: Path,
    *,
    baked: bool,
    models: Sequence[str] = (),
    image: str = "",
    texts: Mapping[str, tuple[str, str]] | None = None,
    **settings: Any,
) -> Deployment:
    """Read a repository and complete the settings, or raise a one-line error.

    ``baked`` means that no local folder can be mounted: an image or a volume contains the models.
    """
    opened = Repository.open(repository)
    present = [model for model in opened if (model.folder / "config.pbtxt").is_file()]
    if not present:
        raise UsageError(f"{repository} has no models", hint="create one with llmserve build")
    for model in opened:
        model.intact()
    names = [model.name for model in present]
    for name in models:
        if name not in names:
            whole = [model.name for model in present if not model.part_of]
            raise UsageError(f"{repository} has no model {name!r}", hint=near(name, whole))
    built = image_for(opened, models)
    if built.models and not models:
        other = min(model.name for model in present if model.name not in built.models)
        raise UsageError(
            f"{other} needs a different image than the other models",
            hint=f"deploy the models of one image: --model {other}",
        )
    loaded = opened.with_parts(models) or tuple(names)
    scripts = [name for name in loaded if opened.model(name).has_launch_script]
    if len(scripts) > 1:
        raise UsageError(
            f"{' and '.join(scripts)} each start a server of several processes",
            hint=f"deploy one of them: --model {scripts[0]}",
        )
    gpus = settings.get("gpus", 0)
    for name in loaded:
        if (needed := _gpus(opened.model(name))) > gpus:
            raise UsageError(
                f"{name} was built for a GPU, and --gpus is {gpus}",
                hint=f"use --gpus {needed}, or build it with --device cpu",
            )
    outside = tuple(opened.references(loaded))
    if baked and outside:
        raise ConfigError(
            f"a model's weights are in {outside[0]}, which other machines do not have",
            hint="build it again with --set weights=copy",
        )
    in_image = baked and not settings.get("volume")
    return Deployment(
        repository=repository,
        image=image or (f"{IMAGE}-models" if in_image else built.name),
        built_image=built.name,
        build=built.build,
        # An image of one's own that names NVIDIA's release is that release.
        triton=named if (named := release_in(image)) is not UNKNOWN else built.triton,
        models=tuple(models),
        folders=loaded,
        script=scripts[0] if scripts else "",
        references=outside,
        texts={name: each for name, each in (texts or {}).items() if name in loaded},
        **settings,
    )


def _gpus(model: Model) -> int:
    """Return how many GPUs Triton needs to load a model."""
    if model.config_damage:
        raise model.config_damage
    groups = model.config.instance_group if model.config else ()
    return max((max(g.gpus, default=0) + 1 for g in groups if g.kind == g.KIND_GPU), default=0)
