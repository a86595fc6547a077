"""A pod of the gateway and Triton, as plain data: what Kubernetes and KServe both run."""

from __future__ import annotations

from typing import Any

from llmserve.repository.dockerfile import MODELS
from llmserve_deploy.description import (
    GATEWAY_PORT,
    HUB_CACHE,
    KEYS_FOLDER,
    LEAVE_SECONDS,
    LOAD_SECONDS,
    SHARED_MEMORY,
    USER,
    Deployment,
)

Data = dict[str, Any]

_PORT = "http"
_LOOPBACK = "127.0.0.1"
# Triton stays until the gateway, which ends what is under way, listens no more.
_AFTER_THE_GATEWAY = (
    f"sleep {LEAVE_SECONDS}; "
    f"while (: < /dev/tcp/{_LOOPBACK}/{GATEWAY_PORT}) 2> /dev/null; do sleep 1; done"
)
_GATEWAY_RESOURCES = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}}
LOCKED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def _probe(path: str, *, every: int, misses: int) -> Data:
    asked = {"path": path, "port": GATEWAY_PORT}
    return {"httpGet": asked, "periodSeconds": every, "failureThreshold": misses,
            "timeoutSeconds": 5}  # fmt: skip


def gateway_container(d: Deployment, name: str = "gateway") -> Data:
    mounts: list[Data] = [{"name": "gateway-tmp", "mountPath": "/tmp"}]
    mounts += (
        [{"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True}] if not d.no_auth else []
    )
    return {
        "name": name,
        "image": d.gateway_image,
        "imagePullPolicy": "IfNotPresent",
        "command": d.gateway_command(_LOOPBACK),
        "ports": [{"name": _PORT, "containerPort": GATEWAY_PORT, "protocol": "TCP"}],
        "startupProbe": _probe("/livez", every=2, misses=30),
        "readinessProbe": _probe("/readyz", every=5, misses=2),
        "livenessProbe": _probe("/livez", every=10, misses=3),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_SECONDS)]}}},
        "resources": _GATEWAY_RESOURCES,
        "securityContext": LOCKED,
        "volumeMounts": mounts,
    }


def triton_container(d: Deployment, name: str = "triton", models: str = MODELS) -> Data:
    """Return Triton on loopback.

    Its probes ask the gateway, which asks every model for a token: Triton's own readiness says
    yes after a model's process has died, and nobody in the container loads it anew.
    """
    token = {"secretKeyRef": {"name": d.hub_secret, "key": "token", "optional": True}}
    mounts: list[Data] = [
        {"name": "triton-tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "hub", "mountPath": HUB_CACHE},
    ]
    if d.volume and models == MODELS:
        mounts += [{"name": "models", "mountPath": MODELS, "readOnly": True}]
    return {
        "name": name,
        "image": d.image,
        "imagePullPolicy": "IfNotPresent",
        # After the image's own entry point, which looks after drivers.
        "args": d.triton_command(models, _LOOPBACK),
        "env": [
            {"name": "HF_HOME", "value": HUB_CACHE},
            {"name": "HF_TOKEN", "valueFrom": token},
            {"name": "HOME", "value": "/tmp"},
        ],
        "startupProbe": _probe("/readyz?all", every=10, misses=LOAD_SECONDS // 10),
        "livenessProbe": _probe("/readyz?all", every=10, misses=9),
        "lifecycle": {"preStop": {"exec": {"command": ["bash", "-c", _AFTER_THE_GATEWAY]}}},
        "resources": resources(d, gpus=0),
        "securityContext": LOCKED,
        "volumeMounts": mounts,
    }


def resources(d: Deployment, gpus: int) -> Data:
    """Return what Triton asks for; no limit of processors, which would only slow it down."""
    of_gpu = {"nvidia.com/gpu": gpus} if gpus else {}
    return {
        "requests": {"cpu": d.cpus, "memory": d.memory},
        "limits": {"memory": d.memory} | of_gpu,
    }


def tolerations(gpus: int) -> Data:
    """Return what lets a pod onto nodes that are kept for who asks for a GPU."""
    kept = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    return {"tolerations": [kept]} if gpus else {}


def volumes(d: Deployment, *, models: bool = True) -> list[Data]:
    found: list[Data] = [
        {"name": "gateway-tmp", "emptyDir": {}},
        {"name": "triton-tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
        {"name": "hub", "emptyDir": {}},
    ]
    if not d.no_auth:
        # Readable to the group alone, which is the gateway's.
        secret = {"secretName": d.keys_secret, "defaultMode": 0o440}
        found.append({"name": "keys", "secret": secret})
    if d.volume and models:
        claim = {"claimName": d.volume, "readOnly": True}
        found.append({"name": "models", "persistentVolumeClaim": claim})
    return found


def pod_settings(d: Deployment, labels: Data) -> Data:
    """Return what a pod has beside its containers and volumes."""
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": d.termination_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels},
            }
        ],
    }
