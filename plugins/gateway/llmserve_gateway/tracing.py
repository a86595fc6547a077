"""A span for each request, in OpenTelemetry's words for generative AI; imported where wanted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from threading import Timer
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from llmserve.client.aio import CALL_HEADERS
from llmserve.server.tracing import traces_url
from llmserve_gateway.addresses import is_loopback
from llmserve_gateway.fields import Asked
from llmserve_gateway.reply import Visit

_TRACEPARENT = TraceContextTextMapPropagator()
_SERVICE = {"service.name": "llmserve-gateway"}
# What is asked for, by the contract's names, which are OpenTelemetry's too; none of it is text.
_ASKED = ("max_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty",
          "frequency_penalty")  # fmt: skip
_LONGEST_NAME = 200
_LAST_SECONDS = 2.0


def send_to(collector: str) -> tuple[SpanProcessor, Callable[[], None]]:
    """Return what sends spans to a collector, from a thread of its own, and what ends that."""
    url = traces_url(collector)
    session = requests.Session()
    # A proxy set for the web cannot reach this machine's own loopback.
    session.trust_env = not is_loopback(urlsplit(url).hostname or "")
    exporter = OTLPSpanExporter(endpoint=url, session=session)
    return BatchSpanProcessor(exporter), exporter.shutdown


class Tracer:
    """Begins the spans of one gateway, and hands each on to Triton as the parent of its own."""

    def __init__(
        self, processor: SpanProcessor, give_up: Callable[[], None] = lambda: None
    ) -> None:
        named = "OTEL_SERVICE_NAME" in os.environ
        resource = Resource.create({} if named else _SERVICE)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._give_up = give_up
        self._tracer = self._provider.get_tracer(__name__)

    def begin(self, headers: Mapping[str, str], operation: str) -> Trace:
        """Begin the span of a request that has just arrived, within what its client traces."""
        span = self._tracer.start_span(
            operation,
            _TRACEPARENT.extract(headers),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, "gen_ai.provider.name": "llmserve"},
        )
        return Trace(span, operation)

    def close(self) -> None:
        """Send what there still is; a collector that does not answer is not waited for long."""
        patience = Timer(_LAST_SECONDS, self._give_up)
        patience.start()
        self._provider.shutdown()
        patience.cancel()


class Trace:
    """The span of one request, from the task that answers it."""

    def __init__(self, span: Any, operation: str) -> None:
        self._span = span
        self._operation = operation
        self._began = time.time_ns()
        carried: dict[str, str] = {}
        if span.is_recording():
            # Triton traces whatever says that it is part of a trace.
            _TRACEPARENT.inject(carried, set_span_in_context(span))
        self._headers = CALL_HEADERS.set((*CALL_HEADERS.get(), *carried.items()))

    def asked(self, asked: Asked) -> None:
        model = asked.model[:_LONGEST_NAME]
        self._span.update_name(f"{self._operation} {model}")
        told = {"model": model, "stream": asked.stream, "choice.count": asked.choices_each}
        told |= {name: asked.options[name] for name in _ASKED if name in asked.options}
        self._span.set_attributes({f"gen_ai.request.{name}": told[name] for name in told})

    def end(self, visit: Visit) -> None:
        CALL_HEADERS.reset(self._headers)
        span = self._span

        def at(moment: float) -> int:
            return self._began + int((moment - visit.arrived) * 1e9)

        told: dict[str, Any] = {
            "http.response.status_code": visit.status,
            "llmserve.request.id": visit.id,
        }
        if visit.admitted is not None:
            span.add_event("llmserve.admitted", timestamp=at(visit.admitted))
            # As vLLM's spans have it: seconds.
            told["gen_ai.latency.time_in_queue"] = visit.admitted - visit.arrived
        if visit.first is not None and visit.streamed:
            span.add_event("llmserve.first_token", timestamp=at(visit.first))
            told["gen_ai.response.time_to_first_chunk"] = visit.first - visit.arrived
        if visit.model:
            told |= {"gen_ai.response.model": visit.model,
                     "gen_ai.usage.input_tokens": visit.read,
                     "gen_ai.usage.output_tokens": visit.written}  # fmt: skip
        if visit.reasons:
            told["gen_ai.response.finish_reasons"] = list(visit.reasons.values())
        if visit.status != 200:
            told["error.type"] = "cancelled" if visit.outcome == "cancelled" else str(visit.status)
        span.set_attributes(told)
        if visit.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(at(visit.ended))
