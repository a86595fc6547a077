"""From the bytes of an answer to its record, once the clock has stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tritonclient.grpc import service_pb2

from llmserve.client.exchange import open_exchange
from llmserve.client.failures import Where, translate
from llmserve.client.results import Piece
from llmserve.errors import (
    ClientError,
    ModelNotReadyError,
    RequestCancelledError,
    RequestRejectedError,
    RequestTimeoutError,
    UnreachableError,
)
from llmserve.measure.asking import Asked
from llmserve.measure.job import Job
from llmserve.measure.runs import Record

_KINDS: tuple[tuple[type[ClientError], str], ...] = (
    (RequestTimeoutError, "timeout"),
    (UnreachableError, "unreachable"),
    (ModelNotReadyError, "not ready"),
    (RequestCancelledError, "cancelled"),
    (RequestRejectedError, "rejected"),
)


@dataclass(frozen=True)
class Read:
    """A record, with its texts where the model did not count its tokens."""

    record: Record
    texts: tuple[str, ...] = ()


def kind_of(error: ClientError) -> str:
    """Name the kind of a failure."""
    return next((name for kind, name in _KINDS if isinstance(error, kind)), "broken answer")


def failure_of(job: Job, asked: Asked) -> ClientError | None:
    """Say what went wrong, if anything; a stream tells it in a message of its own."""
    if asked.failure is not None:
        return asked.failure
    where = Where(job.place.url, job.model.name, job.timeout)
    if asked.code is not None:
        return translate(asked.code, asked.details, where)
    if job.model.exchange == "stream":
        for _, raw in asked.arrivals:
            message = service_pb2.ModelStreamInferResponse.FromString(raw).error_message
            if message:
                return translate("", message, where)
    return None


def read(job: Job, asked: Asked, began: float) -> Read:
    """Read an answer; its times count from ``began``."""
    failure = failure_of(job, asked)
    pieces: list[tuple[float, Piece]] = []
    try:
        pieces = [(at, piece) for at, piece in _pieces(job, asked) if _says_something(piece)]
    except ClientError as error:
        failure = failure or error
    times = tuple(at - began for at, _ in pieces)
    counts = [piece.output_tokens for _, piece in pieces]
    brought = tokens_of(counts, job.model.made_by_llmserve is not None)
    said = [piece for _, piece in pieces]
    record = Record(
        index=asked.ask.index,
        scheduled=asked.scheduled - began,
        sent=asked.sent - began,
        first=times[0] if times else None,
        done=asked.ended - began,
        input_tokens=next((p.input_tokens for p in said if p.input_tokens is not None), None),
        output_tokens=None if brought is None else sum(brought),
        pieces=times,
        tokens=brought or (),
        finish_reason=next((p.finish_reason for p in said if p.finish_reason), None),
        error=kind_of(failure) if failure else None,
        message=str(failure) if failure else None,
    )
    return Read(record, tuple(p.text for p in said) if brought is None else ())


def tokens_of(counts: Sequence[int | None], are_sums: bool) -> tuple[int, ...] | None:
    """Say how many tokens each piece brought; None where the model does not count.

    Ours count the answer so far. Others may count each piece by itself, which shows where a
    count does not grow before the last piece (the last may bring only held-back text).

    >>> tokens_of([1, 4, 8], True)
    (1, 3, 4)
    >>> tokens_of([4, 4, 2], False)
    (4, 4, 2)
    """
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return None
    grows = all(b > a for a, b in pairwise(known[:-1]))
    if are_sums or (grows and known[-1] >= max(known)):
        return tuple(b - a for a, b in zip([0, *known], known, strict=False))
    return tuple(known)


def _pieces(job: Job, asked: Asked) -> list[tuple[float, Piece]]:
    if asked.pieces:
        return asked.pieces
    exchange = open_exchange(job.model, [asked.ask.prompt], asked.ask.options, pieces=job.stream)
    found: list[tuple[float, Piece]] = []
    for at, raw in asked.arrivals:
        if job.model.exchange == "stream":
            response = service_pb2.ModelStreamInferResponse.FromString(raw).infer_response
        else:
            response = service_pb2.ModelInferResponse.FromString(raw)
        if response.outputs:
            found += [(at, piece) for piece in exchange.take(response)]
    return found


def _says_something(piece: Piece) -> bool:
    return piece.is_news or bool(piece.output_tokens)
