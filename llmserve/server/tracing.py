"""The address of an OpenTelemetry collector that receives spans over HTTP."""

from __future__ import annotations

from urllib.parse import urlsplit

from llmserve.errors import UsageError

_PATH = "/v1/traces"


def traces_url(collector: str) -> str:
    """Return the URL for a collector's spans; refuse invalid addresses, and those with secrets."""
    try:
        parts = urlsplit(collector)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(
            "--otlp-endpoint is not a collector's address", hint="as in http://127.0.0.1:4318"
        )
    if "@" in parts.netloc or parts.query:
        # Every user of the machine can read command lines.
        raise UsageError(
            "--otlp-endpoint cannot contain credentials or a query",
            hint="put credentials into OTEL_EXPORTER_OTLP_HEADERS in the environment",
        )
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith(_PATH) else path + _PATH).geturl()


def trace_arguments(collector: str) -> tuple[str, ...]:
    """Return arguments with which Triton traces only requests that belong to a trace already."""
    settings = ("mode=opentelemetry", "rate=0", "level=TIMESTAMPS", "count=-1",
                f"opentelemetry,url={traces_url(collector)}",
                "opentelemetry,resource=service.name=triton")  # fmt: skip
    return tuple(f"--trace-config={setting}" for setting in settings)
