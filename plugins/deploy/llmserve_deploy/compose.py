"""A Docker Compose project: the gateway and Triton on one machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llmserve.contract.container import HF_HOME, HTTP_PORT, LOOPBACK, MODELS, ULIMITS
from llmserve_deploy.description import (
    GATEWAY_PORT,
    KEYS_FILE,
    KEYS_FOLDER,
    LOAD_SECONDS,
    USER,
    Deployment,
)
from llmserve_deploy.images import GATEWAY_DOCKERFILE, image_files
from llmserve_deploy.pods import Data


def compose_files(d: Deployment, out: Path) -> dict[str, Any]:
    dockerfiles = image_files(d)
    project: Data = {
        "name": d.name,
        "services": {"gateway": _gateway(d), "triton": _triton(d, out)},
    }
    if not d.no_auth:
        project["secrets"] = {"keys": {"file": f"./{KEYS_FILE}"}}
    return {
        "compose.yaml": project,
        GATEWAY_DOCKERFILE: dockerfiles[GATEWAY_DOCKERFILE],
    }


def _service(image: str, command: list[str], port: int, path: str, stop: int) -> Data:
    probe = (
        f"from urllib.request import urlopen; urlopen('http://127.0.0.1:{port}{path}', timeout=5)"
    )
    return {
        "image": image,
        "command": command,
        # The user who starts the project, so that mounted files can be read.
        "user": f"${{LLMSERVE_USER:-{USER}}}",
        "read_only": True,
        # Compiled kernels are loaded from there, which Docker forbids by default.
        "tmpfs": ["/tmp:exec"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "stop_grace_period": f"{stop}s",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", probe],
            "interval": "10s",
            "timeout": "10s",
            "retries": 3,
            "start_period": f"{LOAD_SECONDS}s",
        },
    }


def _gateway(d: Deployment) -> Data:
    host = "triton" if d.triton.closes else LOOPBACK
    service = _service(d.gateway_image, d.gateway_command(host), GATEWAY_PORT, "/readyz",
                       d.grace + 5)  # fmt: skip
    service["ports"] = [f"{LOOPBACK}:{GATEWAY_PORT}:{GATEWAY_PORT}"]
    if d.triton.closes:
        # The gateway itself reports when Triton is ready; this makes it stop before Triton.
        service["depends_on"] = {"triton": {"condition": "service_started"}}
    if not d.no_auth:
        service["secrets"] = [{"source": "keys", "target": f"{KEYS_FOLDER}/{KEYS_FILE}"}]
    return service


def _triton(d: Deployment, out: Path) -> Data:
    service = _service(d.image, d.triton_command(), HTTP_PORT, "/v2/health/ready", d.grace + 5)
    repository = os.path.relpath(d.repository.resolve(), out.resolve())
    # Compose reads a dollar sign as the start of a variable.
    folders = [(repository, MODELS), *((path, path) for path in d.references)]
    mounts = [(a.replace("$", "$$"), b.replace("$", "$$"), True) for a, b in folders]
    mounts += [("${HF_HOME:-${HOME}/.cache/huggingface}", HF_HOME, False)]
    service |= {
        "shm_size": "1gb",
        "ulimits": dict(ULIMITS),
        # No value: the token is that of the user who starts the project, and is in no file.
        "environment": {"HF_HOME": HF_HOME, "HOME": "/tmp", "HF_TOKEN": None},
        "volumes": [
            {"type": "bind", "source": source, "target": target, "read_only": read_only}
            for source, target, read_only in mounts
        ],
    }
    if not d.triton.closes:
        # It listens on loopback, and nothing but the gateway shares that.
        service["network_mode"] = "service:gateway"
    if d.gpus:
        device = {"driver": "nvidia", "count": d.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service
