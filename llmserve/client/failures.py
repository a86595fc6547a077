"""What the server or gRPC says went wrong, as errors of llmserve with the mend."""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmserve.client.model import ModelState, ready_names
from llmserve.errors import (
    ClientError,
    ModelNotReadyError,
    RequestCancelledError,
    RequestRejectedError,
    RequestTimeoutError,
    UnreachableError,
)

_REQUEST_ID = re.compile(r"\[request id: [^\]]*\]\s*")
_WRAPPER = re.compile(r"^Failed to process the request\(s\) for model[^,]*, message: ", re.S)
_ENSEMBLE = re.compile(r"^in ensemble '[^']*', ")
_TRACE_AFTER = re.compile(r"\n\s*At:\n.*", re.S)
_TRACE_BEFORE = re.compile(r"Traceback \(most recent call last\):.*\n(?=\S)", re.S)
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[\w.+@-]+/)+(?=[\w.+@-])")
_NEVER_CAME = re.compile(r"failed to connect|errors resolving|resolution failed|handshake", re.I)
_CONNECTING = re.compile(r"timed out|tcp handshaker", re.I)
_NOT_GRPC = re.compile(r"Socket closed|HTTP/2|SETTINGS|http1|GOAWAY", re.I)
_UNKNOWN_MODEL = re.compile(r"(\[[^\]]*\]\s*)?Request for unknown model")
_LONGEST = 600


@dataclass(frozen=True)
class Where:
    url: str
    model: str | None = None
    late: str = ""
    """What has not come in time, if something has not."""


def one_line(message: str) -> str:
    r"""Take request ids, tracebacks and the server's folders out of a message.

    >>> one_line("ValueError: bad weights\n\nAt:\n  /srv/m/1/model.py(5): execute\n")
    'ValueError: bad weights'
    >>> one_line("in ensemble 'm', text_input is empty")
    'text_input is empty'
    """
    text = _ENSEMBLE.sub("", _REQUEST_ID.sub("", message))
    text = _TRACE_AFTER.sub("", text)
    text = _TRACE_BEFORE.sub("", text)
    text = _WRAPPER.sub("", text.strip())
    text = _FOLDERS.sub("", text.removeprefix("TritonModelException: "))
    text = " ".join(text.split()).rstrip(".")
    if len(text) > _LONGEST:
        text = text[:_LONGEST].rstrip() + " ..."
    return text or "the server gave no reason"


def from_rpc(error: Any, where: Where) -> ClientError:
    if not hasattr(error, "code"):
        return RequestCancelledError("the client was closed")
    return translate(error.code().name, error.details() or "", where)


def cut_off(where: Where) -> ClientError:
    return UnreachableError(
        f"{where.url} ended the stream of {where.model!r} before the answer was complete",
        mend="look at the server's log; it may have stopped",
    )


def translate(code: str, details: str, where: Where) -> ClientError:
    """Turn a gRPC status, by its name, into an error; messages of a stream have none: ``""``."""
    if _UNKNOWN_MODEL.match(details):
        return ModelNotReadyError(
            f"the server does not have {where.model!r}", mend="check the name"
        )
    if "maximum queue size" in details:
        return RequestRejectedError(
            f"the queue of {where.model!r} is full",
            mend="try again later, or raise max_queue_size in its config.pbtxt",
        )
    if "Request timeout expired" in details:
        return RequestTimeoutError(
            f"the request waited too long in the queue of {where.model!r}", mend="try again later"
        )
    if "protocol is restricted" in details:
        return RequestRejectedError(one_line(details), mend="give it to connect() in headers")
    if "is not healthy" in details and "Stub" in details:
        return RequestRejectedError(
            f"the process that runs {where.model!r} has died",
            mend="look at the server's log; `llmserve serve` loads it anew, so try again",
        )
    if "shared memory pool" in details:
        return RequestRejectedError(
            f"the server has too little shared memory for a request to {where.model!r}",
            mend="send less at a time, or enlarge its /dev/shm",
        )
    return _by_code(code, details, where)


def _by_code(code: str, details: str, where: Where) -> ClientError:
    if code == "DEADLINE_EXCEEDED":
        return RequestTimeoutError(
            where.late or "no answer in time", mend="allow more time, or ask for less"
        )
    if code == "CANCELLED":
        return RequestCancelledError("the request was cancelled")
    if code == "UNAVAILABLE" and _NEVER_CAME.search(details):
        return _unreachable(details, where)
    if code == "UNAVAILABLE":
        return UnreachableError(
            f"the connection to {where.url} broke: {one_line(details)}",
            mend="look at the server's log; it may have stopped",
        )
    return RequestRejectedError(f"the server refused the request: {one_line(details)}")


def _unreachable(details: str, where: Where) -> UnreachableError:
    late = " in time" if _CONNECTING.search(details) else ""
    if "handshake" in details.lower() and not late:
        return UnreachableError(
            f"no TLS connection to {where.url}",
            mend="use grpc:// when the server has no TLS, else check its certificate",
        )
    return UnreachableError(
        f"no Triton answers at {where.url}{late}",
        mend="start one with `llmserve serve`, name another with --url, or wait if it is still "
        "loading its models",
    )


def may_be_http(error: Any) -> bool:
    """Say whether gRPC has met something that speaks another protocol."""
    details = getattr(error, "details", str)() or ""
    return bool(_NEVER_CAME.search(details) and _NOT_GRPC.search(details))


def speaks_http(host: str, port: int) -> bool:
    """Ask a port whether it speaks HTTP/1, as Triton's port for HTTP does."""
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=2) as connection:
            connection.sendall(b"GET /v2/health/live HTTP/1.0\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except OSError:
        return False


def http_address(where: Where) -> UnreachableError:
    host = where.url.rpartition(":")[0]
    return UnreachableError(
        f"{where.url} speaks HTTP, not gRPC",
        mend=f"name Triton's gRPC port instead (usually 8001), as in --url {host}:8001",
    )


def unknown_model(name: str, states: Sequence[ModelState]) -> ModelNotReadyError:
    for state in states:
        if state.name == name and state.state != "READY":
            reason = f": {one_line(state.reason)}" if state.reason else ""
            return ModelNotReadyError(
                f"{name!r} is {state.state.lower()}{reason}", mend="the server's log says more"
            )
    ready = ready_names(states)
    near = difflib.get_close_matches(name, ready, n=3, cutoff=0.5)
    names = ", ".join([*near, *(other for other in ready if other not in near)])
    mend = f"choose one of {names}" if names else "it has no model that is ready"
    return ModelNotReadyError(f"the server does not have {name!r}", mend=mend)
