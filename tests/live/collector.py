"""A trace collector in this process, which keeps the spans that it receives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from llmserve.testing.web import reply


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    events: list[str]


class Collector:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.keys: set[str | None] = set()

    def receive(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["content-length"]))
        if request.path == "/v1/traces":
            self.keys.add(request.headers["authorization"])
            # Triton 2.51 sends JSON; most other exporters send protobuf.
            is_json = request.headers["content-type"] == "application/json"
            self.spans.extend(_from_json(body) if is_json else _from_protobuf(body))
        reply(request)

    def named(self, prefix: str) -> list[Span]:
        # An exporter sends its spans again if the response is late.
        by_id = {span.id: span for span in list(self.spans)}
        return [span for span in by_id.values() if span.name.startswith(prefix)]


def _from_json(body: bytes) -> list[Span]:
    return [
        Span(_attributes(resource["resource"])["service.name"], span["name"], span["traceId"],
             span["spanId"], span.get("parentSpanId", ""), _attributes(span),
             [event["name"] for event in span.get("events", ())])
        for resource in json.loads(body)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]  # fmt: skip


def _attributes(item: Any) -> dict[str, Any]:
    attributes = item.get("attributes", ())
    return {entry["key"]: next(iter(entry["value"].values())) for entry in attributes}


def _from_protobuf(body: bytes) -> list[Span]:
    def attributes(item: Any) -> dict[str, Any]:
        pairs = ((entry.key, entry.value) for entry in item.attributes)
        return {key: getattr(value, value.WhichOneof("value")) for key, value in pairs}

    return [
        Span(attributes(resource.resource)["service.name"], span.name, span.trace_id.hex(),
             span.span_id.hex(), span.parent_span_id.hex(), attributes(span),
             [event.name for event in span.events])
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]  # fmt: skip
