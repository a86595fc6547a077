"""Files for Ray: a Serve application with one Triton per replica, and KubeRay's RayService."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmserve.contract.container import MODELS
from llmserve_deploy.description import (
    GATEWAY_PORT,
    KEYS_FILE,
    KEYS_FOLDER,
    SPARE_SECONDS,
    USER,
    Deployment,
)
from llmserve_deploy.files import as_yaml
from llmserve_deploy.images import GATEWAY_DOCKERFILE, image_files, ours
from llmserve_deploy.kubernetes import BUSY, manifest
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
"""Extra slots, so that probes and scrapes do not wait behind answers."""
_FLOOD = 1000
"""Requests that a proxy queues; Ray also counts those that it is about to assign to a replica."""
_ENVIRONMENT = {
    # Puts a proxy in C in front of the replicas, instead of Ray's own proxy in Python.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # Runs the application on the replica's own event loop, and writes logs in batches.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_HEAD_RESOURCES = {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}

_DOCKERFILE = """\
# Ray, the gateway and the application in the image with Triton.
#
{sources}

FROM {image}
USER root
# KubeRay's probes ask with wget.
RUN apt-get update && apt-get install -y --no-install-recommends wget \\
    && rm -rf /var/lib/apt/lists/*
# This file too, since a pattern that matches nothing is an error on its own.
COPY {file} *.whl /wheels/
RUN PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir --find-links /wheels \\
        {ray} {packages}
COPY --chmod=755 {application} {home}/
ENV PYTHONPATH={home}
USER {user}
"""


def ray_files(d: Deployment, out: Path) -> dict[str, Any]:
    repository = os.path.relpath(d.repository.resolve(), out.resolve())
    files = {
        APPLICATION: Path(__file__).with_name(APPLICATION).read_text(encoding="utf-8"),
        SERVE_FILE: _serve_config(d, repository, "127.0.0.1", KEYS_FILE),
        RAY_SERVICE: _ray_service(d),
        RAY_DOCKERFILE: _DOCKERFILE.format(
            file=RAY_DOCKERFILE,
            image=d.image,
            ray=f"'ray[serve]=={RAY_VERSION}'",
            **ours(d),
            application=APPLICATION,
            home=_HOME,
            user=USER,
        ),
    }
    dockerfiles = image_files(d)
    del dockerfiles[GATEWAY_DOCKERFILE]
    return files | dockerfiles


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
                "load": list(d.folders) if d.models else [],
                "models": list(d.models),
                **({"texts": {n: [*each] for n, each in d.texts.items()}} if d.texts else {}),
                "keys": None if d.no_auth else keys,
                "open_metrics": d.open_metrics,
                "concurrency": d.concurrency,
                "queue": queue,
                "grace": d.grace,
            },
            "deployments": [{
                "name": "Triton",
                # More than the gateway admits, so that excess requests get the API's own error.
                "max_ongoing_requests": d.concurrency + queue + _SMALL_REQUESTS,
                "max_queued_requests": _FLOOD,
                "backpressure_config": {"status_code": 429, "retry_after_s": 1},
                "health_check_period_s": 2,
                "health_check_timeout_s": 10,
                "graceful_shutdown_timeout_s": d.grace + SPARE_SECONDS,
                "ray_actor_options": {"num_cpus": _cpus(d), "num_gpus": d.gpus},
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


def _cpus(d: Deployment) -> int:
    """Return the CPUs of a node with one Triton, which must be a whole number for Ray."""
    number = float(re.split("[a-zA-Z]", d.cpus)[0])
    return max(1, math.ceil(number / 1000 if d.cpus.endswith("m") else number))


def _ray_service(d: Deployment) -> Data:
    keys = f"{KEYS_FOLDER}/{KEYS_FILE}"
    config = _serve_config(d, MODELS, "0.0.0.0", keys)  # noqa: S104
    # Nothing uses Ray's object store, which would take a third of the memory by default.
    small_store = {"object-store-memory": "100000000"}
    head = {"num-cpus": "0", "dashboard-host": "0.0.0.0", **small_store}  # noqa: S104
    return manifest("ray.io/v1", "RayService", d, {
        "serveConfigV2": as_yaml(config),
        "rayClusterConfig": {
            "rayVersion": RAY_VERSION,
            # Anyone who can reach Ray's own ports can run code.
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
                "rayStartParams": {"num-cpus": str(_cpus(d)), **small_store},
                "template": _pod(d, "ray-worker", resources(d, d.gpus), d.gpus),
            }],
        },
    })  # fmt: skip


def _pod(d: Deployment, name: str, needed: Data, gpus: int) -> Data:
    """Return a Ray node: Ray's own processes, with a replica and its Triton as children."""
    triton = triton_container(d)
    mounts = triton["volumeMounts"]
    if not d.no_auth:
        mounts.append({"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True})
    ports = {"serve": GATEWAY_PORT}
    if name == "ray-head":
        ports |= {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
    labels = {"app.kubernetes.io/name": d.name}
    settings = pod_settings(d, labels)
    # The head requests nodes from the cluster.
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
                "resources": needed,
                "securityContext": LOCKED,
                "volumeMounts": mounts,
            }],
            "volumes": [volume for volume in volumes_of(d) if volume["name"] != "gateway-tmp"],
        },
    }  # fmt: skip
