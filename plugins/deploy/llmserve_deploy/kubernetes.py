"""Kubernetes manifests, with kustomize overlays for CPUs and for GPUs."""

from __future__ import annotations

from typing import Any

from llmserve_deploy.description import GATEWAY_PORT, Deployment
from llmserve_deploy.images import image_files
from llmserve_deploy.pods import (
    Data,
    gateway_container,
    pod_settings,
    resources,
    tolerations,
    triton_container,
    volumes,
)

_WAITING, _RUNNING, _RATIO = (
    "llmserve_requests_waiting", "llmserve_requests_running", "llmserve_queue_to_compute"
)  # fmt: skip
BUSY = 0.75
"""Share of the concurrency at which replicas are added, because a new one takes minutes."""


def kubernetes_files(d: Deployment) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": d.name}
    base = {
        "deployment.yaml": _deployment(d, labels),
        "service.yaml": _service(d, labels),
        **shared_manifests(d, labels, d.name),
    }
    files: dict[str, Any] = {f"base/{name}": content for name, content in base.items()}
    files["base/kustomization.yaml"] = kustomization(base)
    for kind, gpus in (("cpu", 0), ("gpu", d.gpus or 1)):
        patched = "deployment.yaml"
        files[f"overlays/{kind}/kustomization.yaml"] = {
            **kustomization(["../../base"]),
            "patches": [{"path": patched}],
        }
        files[f"overlays/{kind}/{patched}"] = _resources_patch(d, gpus)
    return files | extra_files(d, d.name)


def shared_manifests(d: Deployment, labels: Data, deployment: str) -> dict[str, Any]:
    """Return the manifests next to a deployment, whether Kubernetes or KServe creates its pods."""
    return {
        "poddisruptionbudget.yaml": manifest("policy/v1", "PodDisruptionBudget", d, {
            "maxUnavailable": 1,
            "selector": {"matchLabels": labels},
        }),
        "horizontalpodautoscaler.yaml": _autoscaler(d, deployment, {
            _RUNNING: str(max(1, int(d.concurrency * BUSY))),
            _WAITING: "1",
        }),
        # Triton's ports are on loopback; this protects them even if that is changed.
        "networkpolicy.yaml": manifest("networking.k8s.io/v1", "NetworkPolicy", d, {
            "podSelector": {"matchLabels": labels},
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"port": GATEWAY_PORT, "protocol": "TCP"}]}],
        }),
        "podmonitor.yaml": _pod_monitor(d, labels),
    }  # fmt: skip


def extra_files(d: Deployment, deployment: str) -> dict[str, Any]:
    """Return the files that are not applied with the manifests."""
    return {
        "prometheus-adapter.yaml": _adapter_rules(),
        # NVIDIA's rule. Triton's queue is nearly empty if requests join a batch in flight.
        "queue-to-compute.yaml": _autoscaler(d, deployment, {_RATIO: "1"}),
        **image_files(d),
    }


def kustomization(resources: Any) -> Data:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(resources),
    }


def manifest(version: str, kind: str, d: Deployment, spec: Data) -> Data:
    labels = {"app.kubernetes.io/name": d.name, "app.kubernetes.io/managed-by": "llmserve"}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": d.name, "labels": labels},
        "spec": spec,
    }


def _deployment(d: Deployment, labels: Data) -> Data:
    """Return the deployment, without a replica count, which the autoscaler sets."""
    pod = {
        "metadata": {"labels": labels},
        "spec": {
            **pod_settings(d, labels),
            # Kustomize puts the container that an overlay patches first.
            "containers": [triton_container(d), gateway_container(d)],
            "volumes": volumes(d),
        },
    }
    return manifest("apps/v1", "Deployment", d, {
        "selector": {"matchLabels": labels},
        "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": pod,
    })  # fmt: skip


def _service(d: Deployment, labels: Data) -> Data:
    port = {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}
    return manifest("v1", "Service", d, {"selector": labels, "ports": [port]})


def _autoscaler(d: Deployment, deployment: str, targets: dict[str, str]) -> Data:
    return manifest("autoscaling/v2", "HorizontalPodAutoscaler", d, {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment},
        "minReplicas": d.replicas,
        "maxReplicas": d.most_replicas,
        "metrics": [
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": metric},
                    "target": {"type": "AverageValue", "averageValue": target},
                },
            }
            for metric, target in targets.items()
        ],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
    })  # fmt: skip


def _pod_monitor(d: Deployment, labels: Data) -> Data:
    """Return the PodMonitor for Prometheus' operator; the gateway also serves Triton's metrics."""
    credentials = {"name": d.metrics_secret, "key": "key"}
    authorization = {"authorization": {"credentials": credentials}} if d.scrapes_by_key else {}
    return manifest("monitoring.coreos.com/v1", "PodMonitor", d, {
        # The pods' label with the deployment's name, by which dashboards and alerts select it.
        "jobLabel": next(iter(labels)),
        "selector": {"matchLabels": labels},
        "podMetricsEndpoints": [
            {"port": "http", "path": path, "interval": "15s", **authorization}
            for path in ("/metrics", "/metrics/triton")
        ],
    })  # fmt: skip


def _adapter_rules() -> Data:
    """Return values for the prometheus-adapter chart, which turns series into metrics."""

    def rule(series: str, name: str, query: str) -> Data:
        return {
            "seriesQuery": f'{series}{{namespace!="",pod!=""}}',
            "resources": {
                "overrides": {
                    "namespace": {"resource": "namespace"}, "pod": {"resource": "pod"},
                },
            },
            "name": {"as": name},
            "metricsQuery": query,
        }  # fmt: skip

    total = "sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)"

    def rate(series: str) -> str:
        return f"sum(rate({series}{{<<.LabelMatchers>>}}[1m])) by (<<.GroupBy>>)"

    queue, compute = "nv_inference_queue_duration_us", "nv_inference_compute_infer_duration_us"
    rules = [
        rule("vllm:num_requests_waiting", _WAITING, total),
        rule("vllm:num_requests_running", _RUNNING, total),
        rule(queue, _RATIO, f"{rate(queue)} / clamp_min({rate(compute)}, 1)"),
    ]
    return {"rules": {"default": False, "custom": rules}}


def _resources_patch(d: Deployment, gpus: int) -> Data:
    containers = [{"name": "triton", "resources": resources(d, gpus)}]
    pod = {"containers": containers, **tolerations(gpus)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": d.name},
        "spec": {"template": {"spec": pod}},
    }
