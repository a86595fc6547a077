"""Spans of requests, in OpenTelemetry's conventions for generative AI; imported on demand."""

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

from llmserve.client import CALL_HEADERS
from llmserve.plugin import is_loopback
from llmserve.server import traces_url
from llmserve_gateway.reply import RequestRecord
from llmserve_gateway.text_requests import ParsedRequest
from llmserve_gateway.value_requests import ValueRequest

_TRACEPARENT = TraceContextTextMapPropagator()
_SERVICE = {"service.name": "llmserve-gateway"}
# The tensor contract and OpenTelemetry share these names; none of the values is text.
_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty",
            "frequency_penalty")  # fmt: skip
_MAX_NAME = 200
_FLUSH_SECONDS = 2.0


def make_exporter(collector: str) -> tuple[SpanProcessor, Callable[[], None]]:
    """Return a processor that sends spans from a separate thread, and a function to abort it."""
    url = traces_url(collector)
    session = requests.Session()
    # A proxy from the environment cannot reach this machine's loopback.
    session.trust_env = not is_loopback(urlsplit(url).hostname or "")
    exporter = OTLPSpanExporter(endpoint=url, session=session)
    return BatchSpanProcessor(exporter), exporter.shutdown


class Tracer:
    """Starts the spans of one gateway; each becomes the parent of Triton's spans."""

    def __init__(self, processor: SpanProcessor, abort: Callable[[], None] = lambda: None) -> None:
        has_name = "OTEL_SERVICE_NAME" in os.environ
        resource = Resource.create({} if has_name else _SERVICE)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._abort = abort
        self._tracer = self._provider.get_tracer(__name__)

    def start(self, headers: Mapping[str, str], operation: str) -> Trace:
        """Start the span of a request that has just arrived, within its client's trace."""
        span = self._tracer.start_span(
            operation,
            _TRACEPARENT.extract(headers),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, "gen_ai.provider.name": "llmserve"},
        )
        return Trace(span, operation)

    def close(self) -> None:
        """Send the remaining spans; abort if the collector does not answer soon."""
        timer = Timer(_FLUSH_SECONDS, self._abort)
        timer.start()
        self._provider.shutdown()
        timer.cancel()


class Trace:
    """The span of one request, used in the task that answers it."""

    def __init__(self, span: Any, operation: str) -> None:
        self._span = span
        self._operation = operation
        self._start_time = time.time_ns()
        headers: dict[str, str] = {}
        if span.is_recording():
            # Triton traces every request that has this header.
            _TRACEPARENT.inject(headers, set_span_in_context(span))
        self._headers = CALL_HEADERS.set((*CALL_HEADERS.get(), *headers.items()))

    def set_request(self, request: ParsedRequest | ValueRequest) -> None:
        model = request.model[:_MAX_NAME]
        self._span.update_name(f"{self._operation} {model}")
        count, options = request.answers_per_prompt, request.options
        values = {"model": model, "stream": request.stream, "choice.count": count}
        values |= {name: options[name] for name in _OPTIONS if name in options}
        self._span.set_attributes({f"gen_ai.request.{name}": values[name] for name in values})

    def end(self, record: RequestRecord) -> None:
        CALL_HEADERS.reset(self._headers)
        span = self._span

        def timestamp(moment: float) -> int:
            return self._start_time + int((moment - record.arrived) * 1e9)

        attributes: dict[str, Any] = {
            "http.response.status_code": record.status,
            "llmserve.request.id": record.id,
        }
        if record.admitted is not None:
            span.add_event("llmserve.admitted", timestamp=timestamp(record.admitted))
            # In seconds, as in vLLM's spans.
            attributes["gen_ai.latency.time_in_queue"] = record.admitted - record.arrived
        if record.first_output is not None and record.streamed:
            span.add_event("llmserve.first_token", timestamp=timestamp(record.first_output))
            seconds = record.first_output - record.arrived
            attributes["gen_ai.response.time_to_first_chunk"] = seconds
        if record.model:
            attributes["gen_ai.response.model"] = record.model
            attributes["gen_ai.usage.input_tokens"] = record.input_tokens
            attributes["gen_ai.usage.output_tokens"] = record.output_tokens
        if record.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = list(record.finish_reasons.values())
        if record.status != 200:
            cancelled = record.outcome == "cancelled"
            attributes["error.type"] = "cancelled" if cancelled else str(record.status)
        span.set_attributes(attributes)
        if record.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(timestamp(record.ended))
