"""Translates errors of the server and of gRPC into errors of llmserve with a hint."""

from __future__ import annotations

import difflib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmserve.client.model import ModelState, ready_names
from llmserve.client.workarounds import code_of, one_line, read_connection
from llmserve.contract.failures import UNKNOWN, read, without_wrappers
from llmserve.errors import (
    ClientError,
    ContextLengthError,
    InvalidRequestError,
    ModelDiedError,
    ModelFailedError,
    ModelNotReadyError,
    NotLoadedError,
    QueueFullError,
    RequestCancelledError,
    RequestRejectedError,
    RequestTimeoutError,
    UnreachableError,
    UnsupportedOptionError,
)


@dataclass(frozen=True)
class Recipient:
    """The server and model of a request, and the message for when it times out."""

    url: str
    model: str | None = None
    timeout_message: str = ""


def from_rpc(error: Any, recipient: Recipient) -> ClientError:
    if not hasattr(error, "code"):
        return RequestCancelledError("the client was closed")
    return translate(error.code().name, error.details() or "", recipient)


def cut_off(recipient: Recipient) -> ClientError:
    return UnreachableError(
        f"{recipient.url} ended the stream of {recipient.model!r} before the answer was complete",
        hint="look at the server's log; it may have stopped",
    )


def translate(status: str, details: str, recipient: Recipient) -> ClientError:
    """Turn a gRPC status name into an error; messages of a stream have no status: ``""``."""
    failure = read(details)
    words = one_line(failure.words)
    problem, hint = f"the server refused the request: {words}", None
    if failure.code == UNKNOWN:
        failure = replace(failure, code=code_of(details))
        if failure.code == UNKNOWN and status in _BY_STATUS:
            return _BY_STATUS[status](details, recipient)
        if failure.code in _EXPLAINED:
            problem, hint = _EXPLAINED[failure.code]
            problem, words = problem.format(model=recipient.model, words=words), ""
    return type_of(failure.code)(
        problem,
        hint=hint,
        code=failure.code,
        param=failure.param,
        details=failure.details,
        words=words,
    )


_INVALID = (
    "invalid_value", "unknown_option", "conflicting_options", "empty_prompt", "no_chat_template"
)  # fmt: skip
_KINDS = (
    ContextLengthError, InvalidRequestError, ModelDiedError, ModelFailedError, ModelNotReadyError,
    NotLoadedError, QueueFullError, RequestCancelledError, RequestTimeoutError, UnreachableError,
    UnsupportedOptionError,
)  # fmt: skip
_TYPES: Mapping[str, type[ClientError]] = {
    **{kind.code: kind for kind in _KINDS},
    **dict.fromkeys(_INVALID, InvalidRequestError),
    "constraint_queue_full": QueueFullError,
    "timeout_in_queue": RequestTimeoutError,
    "bad_answer": ClientError,
}


def type_of(code: str) -> type[ClientError]:
    return _TYPES.get(code, RequestRejectedError)


_EXPLAINED = {
    "not_ready": ("the server does not have {model!r}", "check the name"),
    "queue_full": (
        "the queue of {model!r} is full",
        "try again later, or raise max_queue_size in its config.pbtxt",
    ),
    "timeout_in_queue": (
        "the request waited too long in the queue of {model!r}", "try again later"
    ),
    "restricted": ("{words}", "pass it to connect() in headers"),
    "model_died": (
        "the process that runs {model!r} has died",
        "look at the server's log, and try again: `llmserve serve` restarts it",
    ),
    "unreachable": ("{model!r} is being unloaded: its server is stopping", "try again in a moment"),
    "no_memory": (
        "the server has too little shared memory for a request to {model!r}",
        "send less at once, or enlarge its /dev/shm",
    ),
}  # fmt: skip
"""What a user can do about the failures that Triton reports in its own words."""


def _timed_out(details: str, recipient: Recipient) -> ClientError:
    del details
    return RequestTimeoutError(
        recipient.timeout_message or "no answer in time", hint="allow more time, or ask for less"
    )


def _cancelled(details: str, recipient: Recipient) -> ClientError:
    del details, recipient
    return RequestCancelledError("the request was cancelled")


def _unavailable(details: str, recipient: Recipient) -> ClientError:
    connection = read_connection(details)
    if not connection.failed:
        return UnreachableError(
            f"the connection to {recipient.url} broke: {one_line(details)}",
            hint="look at the server's log; it may have stopped",
        )
    if connection.no_tls:
        return UnreachableError(
            f"no TLS connection to {recipient.url}",
            hint="use grpc:// when the server has no TLS, else check its certificate",
        )
    return UnreachableError(
        f"no Triton answers at {recipient.url}{' in time' if connection.late else ''}",
        hint="start one with `llmserve serve`, give another address with --url, or wait if it is "
        "still loading its models",
    )


_BY_STATUS = {
    "DEADLINE_EXCEEDED": _timed_out, "CANCELLED": _cancelled, "UNAVAILABLE": _unavailable
}  # fmt: skip


def may_be_http(error: Any) -> bool:
    """Return whether the server seems to speak a protocol other than gRPC."""
    if isinstance(error, ClientError) or not hasattr(error, "details"):
        return False
    return read_connection(error.details() or "").maybe_http


def speaks_http(host: str, port: int) -> bool:
    """Return whether a port speaks HTTP/1, as Triton's HTTP port does."""
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=2) as connection:
            connection.sendall(b"GET /v2/health/live HTTP/1.0\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except OSError:
        return False


def http_address(recipient: Recipient) -> UnreachableError:
    host = recipient.url.rpartition(":")[0]
    return UnreachableError(
        f"{recipient.url} speaks HTTP, not gRPC",
        hint=f"use Triton's gRPC port instead (usually 8001), as in --url {host}:8001",
    )


def unknown_model(name: str, states: Sequence[ModelState]) -> ModelNotReadyError:
    for state in states:
        if state.name == name and state.state != "READY":
            reason = f": {one_line(without_wrappers(state.reason))}" if state.reason else ""
            return ModelNotReadyError(
                f"{name!r} is {state.state.lower()}{reason}", hint="see the server's log"
            )
    ready = ready_names(states)
    similar = difflib.get_close_matches(name, ready, n=3, cutoff=0.5)
    names = ", ".join([*similar, *(other for other in ready if other not in similar)])
    hint = f"choose one of {names}" if names else "it has no model that is ready"
    return ModelNotReadyError(f"the server does not have {name!r}", hint=hint)
