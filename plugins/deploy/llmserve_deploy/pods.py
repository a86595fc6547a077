"""The pod of the gateway and Triton, as plain data, for both Kubernetes and KServe."""

from __future__ import annotations

from typing import Any

from llmserve.contract.container import HF_HOME, LOOPBACK, MODELS
from llmserve_deploy.description import (
    GATEWAY_PORT,
    KEYS_FOLDER,
    LEAVE_SECONDS,
    LOAD_SECONDS,
    SHARED_MEMORY,
    USER,
    Deployment,
)

Data = dict[str, Any]

_PORT = "http"
# Triton keeps running until the gateway has finished its requests and closed its port.
_AFTER_THE_GATEWAY = (
    f"sleep {LEAVE_SECONDS}; "
    f"while (: < /dev/tcp/{LOOPBACK}/{GATEWAY_PORT}) 2> /dev/null; do sleep 1; done"
)
_GATEWAY_RESOURCES = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}}
LOCKED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def _probe(path: str, *, every: int, misses: int) -> Data:
    request = {"path": path, "port": GATEWAY_PORT}
    return {"httpGet": request, "periodSeconds": every, "failureThreshold": misses,
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
        "command": d.gateway_command(LOOPBACK),
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
    """Return Triton's container, which listens on loopback.

    Its probes query the gateway, which requests a token from every model: before 26.04,
    Triton reports itself ready even after a model's process has died, from then on not at all when
    one of several has, and nothing in the container reloads the model.
    """
    token = {"secretKeyRef": {"name": d.hub_secret, "key": "token", "optional": True}}
    mounts: list[Data] = [
        {"name": "triton-tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "hub", "mountPath": HF_HOME},
    ]
    if d.volume and models == MODELS:
        mounts += [{"name": "models", "mountPath": MODELS, "readOnly": True}]
    return {
        "name": name,
        "image": d.image,
        "imagePullPolicy": "IfNotPresent",
        # Passed to the image's own entry point, which checks the drivers.
        "args": d.triton_command(models, LOOPBACK),
        "env": [
            {"name": "HF_HOME", "value": HF_HOME},
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
    """Return Triton's resources; without a CPU limit, which would only slow it down."""
    gpu_limit = {"nvidia.com/gpu": gpus} if gpus else {}
    return {
        "requests": {"cpu": d.cpus, "memory": d.memory},
        "limits": {"memory": d.memory} | gpu_limit,
    }


def tolerations(gpus: int) -> Data:
    """Return the toleration for nodes that are reserved for pods with GPUs."""
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    return {"tolerations": [toleration]} if gpus else {}


def volumes(d: Deployment, *, models: bool = True) -> list[Data]:
    entries: list[Data] = [
        {"name": "gateway-tmp", "emptyDir": {}},
        {"name": "triton-tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
        {"name": "hub", "emptyDir": {}},
    ]
    if not d.no_auth:
        # Readable only by the group, which is the gateway's.
        secret = {"secretName": d.keys_secret, "defaultMode": 0o440}
        entries.append({"name": "keys", "secret": secret})
    if d.volume and models:
        claim = {"claimName": d.volume, "readOnly": True}
        entries.append({"name": "models", "persistentVolumeClaim": claim})
    return entries


def pod_settings(d: Deployment, labels: Data) -> Data:
    """Return the settings of a pod other than its containers and volumes."""
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
