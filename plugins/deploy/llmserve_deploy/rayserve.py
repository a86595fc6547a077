"""Ray: a Serve application, one Triton per replica, and KubeRay's RayService around it."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmserve.repository.dockerfile import MODELS
from llmserve_deploy.description import (
    GATEWAY_PORT,
    KEYS_FILE,
    KEYS_FOLDER,
    SPARE_SECONDS,
    USER,
    Deployment,
)
from llmserve_deploy.files import as_yaml
from llmserve_deploy.images import GATEWAY_DOCKERFILE, image_files, pinned
from llmserve_deploy.kubernetes import BUSY, named
from llmserve_deploy.pods import (
    LOCKED,
    Data,
    pod_settings,
    resources,
    tolerations,
    triton_container,
)
from llmserve_deploy.pods import volumes as volumes_of

RAY_DOCKERFILE = "Dockerfile.ray"
RAY_VERSION = "2.60.0"
APPLICATION = "llmserve_ray.py"
SERVE_FILE = "serve.yaml"
RAY_SERVICE = "rayservice.yaml"

_HOME = "/opt/llmserve"
_SMALL_REQUESTS = 16
"""Places beside those for answers, so that probes and scrapes do not wait behind them."""
_FLOOD = 1000
"""Requests that a proxy holds: Ray counts those as well for which it is about to find a place."""
_ENVIRONMENT = {
    # A proxy in C in front of the replicas, which pass nothing through Ray's own in Python.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # The application runs on the replica's own loop, and logs are written in bulk.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_HEAD_RESOURCES = {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}

_DOCKERFILE = """\
# Ray, the gateway and the application in the image with Triton. Wheels that are on no index come
# from a folder: docker build -t NAME -f {file} --build-context wheels=DIR .
FROM scratch AS wheels

FROM {image}
USER root
# KubeRay's probes ask with wget.
RUN apt-get update && apt-get install -y --no-install-recommends wget \\
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=wheels,target=/wheels \\
    PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir --find-links /wheels \\
        {packages}
COPY {application} {home}/
ENV PYTHONPATH={home}
USER {user}
"""


def ray_files(d: Deployment, out: Path) -> dict[str, Any]:
    packages = [f"'ray[serve]=={RAY_VERSION}'", *map(pinned, ("llmserve", "llmserve-gateway"))]
    here = os.path.relpath(d.repository.resolve(), out.resolve())
    files = {
        APPLICATION: Path(__file__).with_name(APPLICATION).read_text(encoding="utf-8"),
        SERVE_FILE: _serve_config(d, here, "127.0.0.1", KEYS_FILE),
        RAY_SERVICE: _ray_service(d),
        RAY_DOCKERFILE: _DOCKERFILE.format(
            file=RAY_DOCKERFILE,
            image=d.image,
            packages=" ".join(packages),
            application=APPLICATION,
            home=_HOME,
            user=USER,
        ),
    }
    models = image_files(d)
    del models[GATEWAY_DOCKERFILE]
    return files | models


def _serve_config(d: Deployment, repository: str, host: str, keys: str) -> Data:
    queue = 2 * d.concurrency
    busy = max(1, int(d.concurrency * BUSY))
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": GATEWAY_PORT},
        "applications": [{
            "name": d.name,
            "route_prefix": "/",
            "import_path": f"{APPLICATION.removesuffix('.py')}:build",
            "args": {
                "repository": repository,
                "load": list(d.folders) if d.chosen else [],
                "models": list(d.chosen),
                "keys": None if d.no_auth else keys,
                "open_metrics": d.open_metrics,
                "concurrency": d.concurrency,
                "queue": queue,
                "grace": d.grace,
            },
            "deployments": [{
                "name": "Triton",
                # More than the gateway lets in: what is too much is refused in the API's words.
                "max_ongoing_requests": d.concurrency + queue + _SMALL_REQUESTS,
                "max_queued_requests": _FLOOD,
                "backpressure_config": {"status_code": 429, "retry_after_s": 1},
                "health_check_period_s": 2,
                "health_check_timeout_s": 10,
                "graceful_shutdown_timeout_s": d.grace + SPARE_SECONDS,
                "ray_actor_options": {"num_cpus": _processors(d), "num_gpus": d.gpus},
                "autoscaling_config": {
                    "min_replicas": d.replicas,
                    "max_replicas": d.most_replicas,
                    "target_ongoing_requests": busy,
                    "upscale_delay_s": 15,
                    "downscale_delay_s": 300,
                },
            }],
        }],
    }  # fmt: skip


def _processors(d: Deployment) -> int:
    """Return as many as a node with one Triton says it has, which is a whole number for Ray."""
    number = float(re.split("[a-zA-Z]", d.cpus)[0])
    return max(1, math.ceil(number / 1000 if d.cpus.endswith("m") else number))


def _ray_service(d: Deployment) -> Data:
    keys = f"{KEYS_FOLDER}/{KEYS_FILE}"
    config = _serve_config(d, MODELS, "0.0.0.0", keys)  # noqa: S104
    # Nothing goes by way of Ray's store, which takes a third of the memory if it may.
    started = {"object-store-memory": "100000000"}
    head = {"num-cpus": "0", "dashboard-host": "0.0.0.0", **started}  # noqa: S104
    return named("ray.io/v1", "RayService", d, {
        "serveConfigV2": as_yaml(config),
        "rayClusterConfig": {
            "rayVersion": RAY_VERSION,
            # Whoever reaches Ray's own ports runs what they like.
            "authOptions": {"mode": "token"},
            "enableInTreeAutoscaling": True,
            "headGroupSpec": {
                "rayStartParams": head,
                "template": _pod(replace(d, volume=""), "ray-head", _HEAD_RESOURCES, 0),
            },
            "workerGroupSpecs": [{
                "groupName": "triton",
                "replicas": d.replicas,
                "minReplicas": d.replicas,
                "maxReplicas": d.most_replicas,
                "rayStartParams": {"num-cpus": str(_processors(d)), **started},
                "template": _pod(d, "ray-worker", resources(d, d.gpus), d.gpus),
            }],
        },
    })  # fmt: skip


def _pod(d: Deployment, name: str, needs: Data, gpus: int) -> Data:
    """Return a node of Ray: Ray's own processes, and a replica with its Triton as their child."""
    triton = triton_container(d)
    mounts = triton["volumeMounts"]
    if not d.no_auth:
        mounts.append({"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True})
    ports = {"serve": GATEWAY_PORT}
    if name == "ray-head":
        ports |= {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
    labels = {"app.kubernetes.io/name": d.name}
    settings = pod_settings(d, labels)
    # The head asks the cluster for nodes.
    settings["automountServiceAccountToken"] = name == "ray-head"
    return {
        "metadata": {"labels": labels},
        "spec": {
            **settings,
            **tolerations(gpus),
            "containers": [{
                "name": name,
                "image": d.gateway_image,
                "imagePullPolicy": "IfNotPresent",
                "env": [
                    *triton["env"],
                    *({"name": key, "value": value} for key, value in _ENVIRONMENT.items()),
                ],
                "ports": [{"name": key, "containerPort": port} for key, port in ports.items()],
                "resources": needs,
                "securityContext": LOCKED,
                "volumeMounts": mounts,
            }],
            "volumes": [one for one in volumes_of(d) if one["name"] != "gateway-tmp"],
        },
    }  # fmt: skip
