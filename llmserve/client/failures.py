"""Translates errors of the server and of gRPC into errors of llmserve with a hint."""

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
_NOT_CONNECTED = re.compile(r"failed to connect|errors resolving|resolution failed|handshake", re.I)
_CONNECTING = re.compile(r"timed out|tcp handshaker", re.I)
_NOT_GRPC = re.compile(r"Socket closed|HTTP/2|SETTINGS|http1|GOAWAY", re.I)
_UNKNOWN_MODEL = re.compile(r"(\[[^\]]*\]\s*)?Request for unknown model")
# Only where the message begins: a refusal may quote any words of a request further on.
_DEAD = re.compile(r"Stub process( '[^']*')? is not healthy")
_QUEUE_FULL = "Exceeds maximum queue size"
_WAITED = "Request timeout expired"
_MAX_LENGTH = 600


@dataclass(frozen=True)
class Target:
    """The server and model of a request, and the message for when it times out."""

    url: str
    model: str | None = None
    timeout_message: str = ""


def one_line(message: str) -> str:
    r"""Remove request ids, tracebacks and the server's folders from a message.

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
    if len(text) > _MAX_LENGTH:
        text = text[:_MAX_LENGTH].rstrip() + " ..."
    return text or "the server gave no reason"


def from_rpc(error: Any, target: Target) -> ClientError:
    if not hasattr(error, "code"):
        return RequestCancelledError("the client was closed")
    return translate(error.code().name, error.details() or "", target)


def cut_off(target: Target) -> ClientError:
    return UnreachableError(
        f"{target.url} ended the stream of {target.model!r} before the answer was complete",
        mend="look at the server's log; it may have stopped",
    )


def translate(code: str, details: str, target: Target) -> ClientError:
    """Turn a gRPC status name into an error; messages of a stream have no status: ``""``."""
    if _UNKNOWN_MODEL.match(details):
        return ModelNotReadyError(
            f"the server does not have {target.model!r}", mend="check the name"
        )
    message = one_line(details)
    if message.startswith(_QUEUE_FULL):
        return RequestRejectedError(
            f"the queue of {target.model!r} is full",
            mend="try again later, or raise max_queue_size in its config.pbtxt",
        )
    if message.startswith(_WAITED):
        return RequestTimeoutError(
            f"the request waited too long in the queue of {target.model!r}", mend="try again later"
        )
    if "protocol is restricted" in details:
        return RequestRejectedError(message, mend="pass it to connect() in headers")
    if _DEAD.match(message):
        return RequestRejectedError(
            f"the process that runs {target.model!r} has died",
            mend="look at the server's log, and try again: `llmserve serve` restarts it",
        )
    if "shared memory pool" in details:
        return RequestRejectedError(
            f"the server has too little shared memory for a request to {target.model!r}",
            mend="send less at once, or enlarge its /dev/shm",
        )
    return _by_code(code, details, target)


def _by_code(code: str, details: str, target: Target) -> ClientError:
    if code == "DEADLINE_EXCEEDED":
        return RequestTimeoutError(
            target.timeout_message or "no answer in time", mend="allow more time, or ask for less"
        )
    if code == "CANCELLED":
        return RequestCancelledError("the request was cancelled")
    if code == "UNAVAILABLE" and _NOT_CONNECTED.search(details):
        return _unreachable(details, target)
    if code == "UNAVAILABLE":
        return UnreachableError(
            f"the connection to {target.url} broke: {one_line(details)}",
            mend="look at the server's log; it may have stopped",
        )
    return RequestRejectedError(f"the server refused the request: {one_line(details)}")


def _unreachable(details: str, target: Target) -> UnreachableError:
    late = " in time" if _CONNECTING.search(details) else ""
    if "handshake" in details.lower() and not late:
        return UnreachableError(
            f"no TLS connection to {target.url}",
            mend="use grpc:// when the server has no TLS, else check its certificate",
        )
    return UnreachableError(
        f"no Triton answers at {target.url}{late}",
        mend="start one with `llmserve serve`, give another address with --url, or wait if it is "
        "still loading its models",
    )


def may_be_http(error: Any) -> bool:
    """Return whether the server seems to speak a protocol other than gRPC."""
    details = getattr(error, "details", str)() or ""
    return bool(_NOT_CONNECTED.search(details) and _NOT_GRPC.search(details))


def speaks_http(host: str, port: int) -> bool:
    """Return whether a port speaks HTTP/1, as Triton's HTTP port does."""
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=2) as connection:
            connection.sendall(b"GET /v2/health/live HTTP/1.0\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except OSError:
        return False


def http_address(target: Target) -> UnreachableError:
    host = target.url.rpartition(":")[0]
    return UnreachableError(
        f"{target.url} speaks HTTP, not gRPC",
        mend=f"use Triton's gRPC port instead (usually 8001), as in --url {host}:8001",
    )


def unknown_model(name: str, states: Sequence[ModelState]) -> ModelNotReadyError:
    for state in states:
        if state.name == name and state.state != "READY":
            reason = f": {one_line(state.reason)}" if state.reason else ""
            return ModelNotReadyError(
                f"{name!r} is {state.state.lower()}{reason}", mend="see the server's log"
            )
    ready = ready_names(states)
    similar = difflib.get_close_matches(name, ready, n=3, cutoff=0.5)
    names = ", ".join([*similar, *(other for other in ready if other not in similar)])
    mend = f"choose one of {names}" if names else "it has no model that is ready"
    return ModelNotReadyError(f"the server does not have {name!r}", mend=mend)
