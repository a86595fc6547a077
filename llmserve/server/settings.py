"""What a server is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmserve.container import IMAGE

Runtime = Literal["auto", "embedded", "binary", "docker"]


@dataclass(frozen=True)
class ServerSettings:
    """Which repository to serve, how, and where to listen.

    A port of 0 means a free one. ``models`` names the models to load; without it all
    are loaded. ``explicit`` loads nothing but ``models`` and lets
    :meth:`Server.load` and :meth:`Server.unload` change that at run time.
    ``image``, ``gpus`` and ``mounts`` matter to a container only: ``gpus=None`` gives it the
    GPUs where Docker has NVIDIA's runtime, and ``mounts`` are folders that models refer to.

    >>> ServerSettings(Path("model_repository"), grpc_port=0).host
    '127.0.0.1'
    """

    repository: Path
    runtime: Runtime = "auto"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    models: tuple[str, ...] = ()
    explicit: bool = False
    log_file: Path | None = None
    ready_timeout: float = 900.0
    image: str = IMAGE
    gpus: bool | None = None
    mounts: tuple[Path, ...] = ()
    extra_args: tuple[str, ...] = ()
