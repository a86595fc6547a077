"""KServe's runtime and service, and the pool of the Gateway API inference extension."""

from __future__ import annotations

from typing import Any

from llmserve.contract.container import MODELS
from llmserve_deploy.description import GATEWAY_PORT, Deployment
from llmserve_deploy.kubernetes import extra_files, kustomization, manifest, shared_manifests
from llmserve_deploy.pods import (
    Data,
    gateway_container,
    pod_settings,
    resources,
    tolerations,
    triton_container,
    volumes,
)

_FORMAT = "llmserve"
# KServe's own names: it mounts models from a volume into the first, and its service points to the
# second if a pod has both.
_TRITON, _GATEWAY = "kserve-container", "transformer-container"
_MOUNTED = "/mnt/models"
_PICKER_PORT = 9002


def kserve_files(d: Deployment) -> dict[str, Any]:
    labels = {"serving.kserve.io/inferenceservice": d.name}
    deployment = f"{d.name}-predictor"
    applied = {
        "servingruntime.yaml": _runtime(d),
        "inferenceservice.yaml": _inference_service(d, labels),
        **shared_manifests(d, labels, deployment),
    }
    return {
        **applied,
        "kustomization.yaml": kustomization(applied),
        "inferencepool.yaml": _pool(d, labels),
        **extra_files(d, deployment),
    }


def _runtime(d: Deployment) -> Data:
    triton = triton_container(d, _TRITON, _MOUNTED if d.volume else MODELS)
    triton["resources"] = resources(d, d.gpus)
    return manifest("serving.kserve.io/v1alpha1", "ServingRuntime", d, {
        "supportedModelFormats": [{"name": _FORMAT, "version": "1", "autoSelect": True}],
        "containers": [triton, gateway_container(d, _GATEWAY)],
        "volumes": volumes(d, models=False),
        **tolerations(d.gpus),
    })  # fmt: skip


def _inference_service(d: Deployment, labels: Data) -> Data:
    model: Data = {"modelFormat": {"name": _FORMAT, "version": "1"}, "runtime": d.name}
    if d.volume:
        model["storageUri"] = f"pvc://{d.volume}"
    service = manifest("serving.kserve.io/v1beta1", "InferenceService", d, {
        "predictor": {
            "minReplicas": d.replicas,
            "maxReplicas": d.most_replicas,
            "model": model,
            **pod_settings(d, labels),
        },
    })  # fmt: skip
    service["metadata"]["annotations"] = {
        # KServe's older name for what is now called Standard; new versions accept both.
        "serving.kserve.io/deploymentMode": "RawDeployment",
        # Our own autoscaler uses the gateway's metrics; KServe's cannot.
        "serving.kserve.io/autoscalerClass": "external",
    }
    return service


def _pool(d: Deployment, labels: Data) -> Data:
    return manifest("inference.networking.k8s.io/v1", "InferencePool", d, {
        "selector": {"matchLabels": labels},
        "targetPorts": [{"number": GATEWAY_PORT}],
        "endpointPickerRef": {"name": f"{d.name}-epp", "port": {"number": _PICKER_PORT}},
    })  # fmt: skip
