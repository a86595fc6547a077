"""What is done because of others' faults, and what Triton and gRPC say without a code.

This is the only place that compares their sentences: a row can go when the releases that a user may
run send a code instead. What llmserve's runtime sends has one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmserve.contract.failures import UNKNOWN, is_raised, without_wrappers
from llmserve.contract.workaround import Workaround

LEAKING_READ = Workaround(
    "A cancelled read of a stream leaks what it has allocated; with its call, it just ends.",
    "grpcio 1.85.1, grpc.aio",
    ("aio:AsyncChannel.read",),
    "a thousand cancelled reads leave no more memory than a hundred, with a plain `stream.read()`",
)
LOST_REQUEST = Workaround(
    "Cancelling a stream that has just ended can make the server lose another request.",
    "Triton 2.51 (24.10)",
    ("aio:AsyncClient._stream",),
    "of a thousand requests beside streams cancelled at their last message, all are answered",
)


@dataclass(frozen=True)
class Sentence:
    """How a sentence begins, and what it means; a request is quoted only further on."""

    start: str
    code: str
    read_in: str
    """The sources and releases that have it; all of 23.10 to 26.08 unless it says otherwise."""


SENTENCES = (
    Sentence("Request for unknown model", "not_ready", "core: src/model_repository_manager.cc"),
    Sentence("Exceeds maximum queue size", "queue_full", "core: src/dynamic_batch_scheduler.cc"),
    Sentence("Request timeout expired", "timeout_in_queue", "core: src/scheduler_utils.cc"),
    Sentence("This protocol is restricted", "restricted", "server: src/grpc/grpc_handler.h"),
    Sentence("Stub process", "model_died", "python_backend: src/python_be.cc; with or without "
             "the name of the process"),
    Sentence("Server is stopping", "unreachable", "core: src/dynamic_batch_scheduler.cc and "
             "src/sequence_batch_scheduler/sequence_batch_scheduler.cc"),
    Sentence("Failed to increase the shared memory pool size", "no_memory",
             "python_backend: src/shm_manager.cc"),
)  # fmt: skip


def code_of(text: str) -> str:
    """Return which failure a message without a code is; most are words of a model: ``unknown``."""
    words = without_wrappers(text)
    for sentence in SENTENCES:
        if words.startswith(sentence.start):
            return sentence.code
    return "model_failed" if is_raised(text) else UNKNOWN


_NOT_CONNECTED = ("failed to connect", "errors resolving", "resolution failed", "handshake")
_LATE = ("timed out", "tcp handshaker")
_NOT_GRPC = ("socket closed", "http/2", "settings", "http1", "goaway")


@dataclass(frozen=True)
class Connection:
    """What gRPC's words about a connection mean; it puts the cause last, after the address."""

    failed: bool
    late: bool
    no_tls: bool
    maybe_http: bool


def read_connection(details: str) -> Connection:
    """Read the details of gRPC's UNAVAILABLE (1.50 to 1.76); they quote no request.

    It has no status for the cause, so that this stays as long as gRPC is used.
    """

    def says(*words: str) -> bool:
        return any(word in lowered for word in words)

    lowered = details.lower()
    failed, late = says(*_NOT_CONNECTED), says(*_LATE)
    return Connection(failed, late, says("handshake") and not late, failed and says(*_NOT_GRPC))


_TRACE_AFTER = re.compile(r"\n\s*At:\n.*", re.S)
_TRACE_BEFORE = re.compile(r"Traceback \(most recent call last\):.*\n(?=\S)", re.S)
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[\w.+@-]+/)+(?=[\w.+@-])")
_MAX_LENGTH = 600


def one_line(words: str) -> str:
    r"""Remove tracebacks and the server's folders from what it says.

    >>> one_line("ValueError: bad weights\n\nAt:\n  /srv/m/1/model.py(5): execute\n")
    'ValueError: bad weights'
    """
    text = _TRACE_BEFORE.sub("", _TRACE_AFTER.sub("", words))
    text = " ".join(_FOLDERS.sub("", text).split()).rstrip(".")
    if len(text) > _MAX_LENGTH:
        text = text[:_MAX_LENGTH].rstrip() + " ..."
    return text or "the server gave no reason"
