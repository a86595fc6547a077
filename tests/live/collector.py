"""A collector of traces in this process: it keeps the spans that it is sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support import reply


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

    def take(self, sent: BaseHTTPRequestHandler) -> None:
        body = sent.rfile.read(int(sent.headers["content-length"]))
        if sent.path == "/v1/traces":
            self.keys.add(sent.headers["authorization"])
            # Triton 2.51 sends JSON, and most others protobuf.
            is_json = sent.headers["content-type"] == "application/json"
            self.spans.extend(_from_json(body) if is_json else _from_protobuf(body))
        reply(sent)

    def named(self, start: str) -> list[Span]:
        # Whoever sends them sends them again where the answer comes late.
        each = {span.id: span for span in list(self.spans)}
        return [span for span in each.values() if span.name.startswith(start)]


def _from_json(body: bytes) -> list[Span]:
    return [
        Span(_values(resource["resource"])["service.name"], span["name"], span["traceId"],
             span["spanId"], span.get("parentSpanId", ""), _values(span),
             [event["name"] for event in span.get("events", ())])
        for resource in json.loads(body)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]  # fmt: skip


def _values(within: Any) -> dict[str, Any]:
    return {one["key"]: next(iter(one["value"].values())) for one in within.get("attributes", ())}


def _from_protobuf(body: bytes) -> list[Span]:
    def values(within: Any) -> dict[str, Any]:
        return {
            one.key: getattr(one.value, one.value.WhichOneof("value")) for one in within.attributes
        }

    return [
        Span(values(resource.resource)["service.name"], span.name, span.trace_id.hex(),
             span.span_id.hex(), span.parent_span_id.hex(), values(span),
             [event.name for event in span.events])
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]  # fmt: skip
