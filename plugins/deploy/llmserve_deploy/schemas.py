"""Schemas of objects that Kubernetes itself does not define, reduced to the fields we write.

No schema accepts a field that it does not list, so that misspelt names are found. The content of a
runtime's pods is checked as a Pod. The fields are those of the definitions in kserve (v1alpha1,
v1beta1), gateway-api-inference-extension (v1), prometheus-operator (v1), kustomize (v1beta1),
kuberay (v1), of Ray Serve's ``ray.serve.schema`` (2.60), and in the documentation of
prometheus-adapter.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
NUMBER: Schema = {"type": "integer", "minimum": 0}
COUNT: Schema = {"type": "integer", "minimum": 1}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
ANY: Schema = {}


def closed(required: str = "", **fields: Schema) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


def listed(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def resource(version: str, kind: str, spec: Schema) -> Schema:
    metadata = closed("name", name=TEXT, labels=TEXTS, annotations=TEXTS)
    return closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": version}, kind={"const": kind}, metadata=metadata, spec=spec,
    )  # fmt: skip


SELECTOR = closed("matchLabels", matchLabels={**TEXTS, "minProperties": 1})
_POD = {
    "automountServiceAccountToken": ANY, "securityContext": ANY,
    "terminationGracePeriodSeconds": NUMBER, "topologySpreadConstraints": ANY,
}  # fmt: skip
_SCRAPE = closed(
    "port path", port=TEXT, path={"type": "string", "pattern": "^/"},
    interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
    authorization=closed("credentials", credentials=closed("key name", name=TEXT, key=TEXT)),
)  # fmt: skip
RULES = closed("groups", groups=listed(closed("name rules", name=TEXT, rules=listed(closed(
    "alert expr", alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS,
    **{"for": {"type": "string", "pattern": "^[0-9]+(s|m|h)$"}},
)))))  # fmt: skip

_TEMPLATE = closed("spec", metadata=closed(labels=TEXTS), spec=ANY)
_ARGS = closed(
    "repository load models keys open_metrics concurrency queue grace",
    repository=TEXT, load={"type": "array", "items": TEXT}, models={"type": "array", "items": TEXT},
    keys={"type": ["string", "null"]}, open_metrics={"type": "boolean"}, concurrency=COUNT,
    queue=NUMBER, grace=COUNT,
)  # fmt: skip
_AUTOSCALING = closed(
    "min_replicas max_replicas target_ongoing_requests", min_replicas=COUNT, max_replicas=COUNT,
    target_ongoing_requests=COUNT, upscale_delay_s=NUMBER, downscale_delay_s=NUMBER,
)  # fmt: skip
SERVE = closed(
    "applications",
    proxy_location={"enum": ["EveryNode", "HeadOnly", "Disabled"]},
    http_options=closed("host port", host=TEXT, port=PORT),
    applications=listed(closed(
        "name import_path", name=TEXT, route_prefix={"type": "string", "pattern": "^/"},
        import_path={"type": "string", "pattern": "^[^:]+:[^:]+$"}, args=_ARGS,
        deployments=listed(closed(
            "name", name=TEXT, max_ongoing_requests=COUNT, max_queued_requests=NUMBER,
            backpressure_config=closed(status_code={"enum": [429, 503]}, retry_after_s=NUMBER),
            health_check_period_s=COUNT, health_check_timeout_s=COUNT,
            graceful_shutdown_timeout_s=NUMBER,
            ray_actor_options=closed(num_cpus=NUMBER, num_gpus=NUMBER),
            autoscaling_config=_AUTOSCALING,
        )),
    )),
)  # fmt: skip
"""The configuration file of Ray Serve."""

KINDS: dict[str, Schema] = {
    "RayService": resource("ray.io/v1", "RayService", closed(
        "serveConfigV2 rayClusterConfig",
        serveConfigV2=TEXT,
        rayClusterConfig=closed(
            "headGroupSpec", rayVersion=TEXT, enableInTreeAutoscaling={"type": "boolean"},
            authOptions=closed("mode", mode={"enum": ["disabled", "token"]}),
            headGroupSpec=closed("template", rayStartParams=TEXTS, template=_TEMPLATE),
            workerGroupSpecs=listed(closed(
                "groupName minReplicas maxReplicas template", groupName=TEXT, replicas=NUMBER,
                minReplicas=NUMBER, maxReplicas=NUMBER, rayStartParams=TEXTS, template=_TEMPLATE,
            )),
        ),
    )),
    "ServingRuntime": resource("serving.kserve.io/v1alpha1", "ServingRuntime", closed(
        "containers",
        supportedModelFormats=listed(closed("name", name=TEXT, version=TEXT,
                                            autoSelect={"type": "boolean"})),
        containers=listed(ANY), volumes=listed(ANY), tolerations=listed(ANY),
    )),
    "InferenceService": resource("serving.kserve.io/v1beta1", "InferenceService", closed(
        "predictor",
        predictor=closed(
            "model", minReplicas=NUMBER, maxReplicas=NUMBER, **_POD,
            model=closed("modelFormat", modelFormat=closed("name", name=TEXT, version=TEXT),
                         runtime=TEXT, storageUri=TEXT),
        ),
    )),
    "InferencePool": resource("inference.networking.k8s.io/v1", "InferencePool", closed(
        "selector targetPorts endpointPickerRef",
        selector=SELECTOR,
        targetPorts={**listed(closed("number", number=PORT)), "maxItems": 8},
        endpointPickerRef=closed("name port", name=TEXT, port=closed("number", number=PORT)),
    )),
    "PodMonitor": resource("monitoring.coreos.com/v1", "PodMonitor", closed(
        "selector", jobLabel=TEXT, selector=SELECTOR, podMetricsEndpoints=listed(_SCRAPE),
    )),
    "PrometheusRule": resource("monitoring.coreos.com/v1", "PrometheusRule", RULES),
    "Kustomization": closed(
        "apiVersion kind resources",
        apiVersion={"const": "kustomize.config.k8s.io/v1beta1"}, kind={"const": "Kustomization"},
        resources=listed(TEXT), patches=listed(closed("path", path=TEXT)),
    ),
}  # fmt: skip

FILES: dict[str, Schema] = {
    "prometheus-adapter.yaml": closed("rules", rules=closed(
        "default custom",
        default={"type": "boolean"},
        custom=listed(closed(
            "seriesQuery resources name metricsQuery",
            seriesQuery=TEXT, resources=closed("overrides", overrides=ANY),
            name=closed("as", **{"as": TEXT}), metricsQuery=TEXT,
        )),
    )),
    "alerts.yaml": RULES,
    "serve.yaml": SERVE,
}  # fmt: skip
"""Files that are not Kubernetes objects, by name."""
