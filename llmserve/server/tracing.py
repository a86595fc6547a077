"""Where spans go: a collector of OpenTelemetry's, which takes its protocol over HTTP."""

from __future__ import annotations

from urllib.parse import urlsplit

from llmserve.errors import UsageError

_PATH = "/v1/traces"


def traces_url(collector: str) -> str:
    """Return where a collector takes spans; refuse an address that is none, or holds a secret."""
    try:
        parts = urlsplit(collector)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise UsageError(
            "--otlp-endpoint is no collector's address", mend="as in http://127.0.0.1:4318"
        )
    if "@" in parts.netloc or parts.query:
        # Every user of the machine can read command lines.
        raise UsageError(
            "--otlp-endpoint takes no secret and no query",
            mend="put credentials into OTEL_EXPORTER_OTLP_HEADERS in the environment",
        )
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith(_PATH) else path + _PATH).geturl()


def trace_arguments(collector: str) -> tuple[str, ...]:
    """Return what has Triton trace the requests that say what they are part of, and no others."""
    told = ("mode=opentelemetry", "rate=0", "level=TIMESTAMPS", "count=-1",
            f"opentelemetry,url={traces_url(collector)}",
            "opentelemetry,resource=service.name=triton")  # fmt: skip
    return tuple(f"--trace-config={each}" for each in told)
