"""What a request can fail of: a row per failure, and how one crosses Triton's single error string.

The runtime writes ``[llmserve context_length_exceeded param=max_tokens context=64] words``. The
client reads it once, and nothing else looks into the words. A new failure is a row here and the
place that raises it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["FAILURES", "Failure", "read", "write"]
"""What plugins may use."""


@dataclass(frozen=True)
class Row:
    """What a code means, and what an HTTP API answers to it."""

    code: str
    status: int
    meaning: str
    api: str = ""
    """What OpenAI's API calls it, if not by the code."""
    retry_after: int | None = None
    """The seconds after which the same request may succeed."""

    @property
    def api_code(self) -> str:
        return self.api or self.code


_DOUBLINGS = 64
"""More than lead to any longest pause; a thousand would overflow."""


def back_off(failures: int, first: float, longest: float) -> float:
    """Return the seconds until the next try: twice as many after each failure.

    >>> [back_off(failures, 5, 300) for failures in (0, 1, 2, 6, 2000)]
    [5.0, 10.0, 20.0, 300, 300]
    """
    return min(first * 2.0 ** min(failures, _DOUBLINGS), longest)


_ROWS = (
    Row("invalid_request", 400, "the request cannot be read, or its parts contradict one another"),
    Row("invalid_value", 400, "an option has a value of the wrong type or out of range"),
    Row("unknown_option", 400, "no such option; the name is close to another", "unknown_parameter"),
    Row("unsupported_option", 400, "this model does not have the option", "unsupported_parameter"),
    Row("conflicting_options", 400, "two options that cannot be used together"),
    Row("empty_prompt", 400, "the prompt has no tokens"),
    Row("no_chat_template", 400, "messages were sent to a model without a chat template"),
    Row("context_length_exceeded", 400, "the prompt and its answer do not fit the model's context"),
    Row("adapter_not_found", 404, "the model has no adapter of that name", "model_not_found"),
    Row("adapter_unusable", 500, "the files of the adapter do not fit the model"),
    Row("not_a_number", 422, "the model computed something that is no number for this text"),
    Row("queue_full", 429, "too many requests wait for the model", retry_after=1),
    Row("constraint_queue_full", 429, "too many new constraints are compiled", "queue_full", 1),
    Row("constraint_not_checked", 503, "the constraint could not be checked", retry_after=1),
    Row("image_not_read", 503, "an image could not be decoded for want of memory", retry_after=1),
    Row("stream_exists", 409, "the model's process has a shared stream of that name already"),
    Row("timeout", 504, "no complete answer within the request's time limit"),
    Row("timeout_in_queue", 504, "the request waited too long in the model's queue", "timeout"),
    Row("cancelled", 499, "the client cancelled the request"),
    # A model whose process has died usually answers again after seven seconds.
    Row("model_died", 503, "the process that runs the model has died", retry_after=5),
    Row("model_failed", 500, "the model raised an error; the server's log has the traceback"),
    Row("no_memory", 413, "the server has too little shared memory for the request"),
    Row("not_ready", 404, "the server does not have the model or still loads it",
        "model_not_found"),
    Row("not_loaded", 503, "a model that is loaded on demand could not be loaded",
        "model_not_loaded", 5),
    Row("unreachable", 503, "no server answers at the address", "backend_unavailable", 2),
    Row("restricted", 500, "the server wants a header that closes its interfaces to others"),
    Row("bad_answer", 500, "the server sent an answer that cannot be read"),
    Row("unknown", 400, "a server or model that is not llmserve's refused in its own words"),
)  # fmt: skip
FAILURES: Mapping[str, Row] = {row.code: row for row in _ROWS}

MAY_SUCCEED_LATER = frozenset({502, 504} | {row.status for row in _ROWS if row.retry_after})
"""The statuses after which a batch sends a request again: of ours, and of a proxy before us."""
DEATHS_OF_ONE = 2
"""A request of a batch is sent no more after its model has died of it so often: the first time
others may have been beside it, the second time it was alone."""

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Failure:
    """A failure that crosses Triton; the details are numbers, such as the length of the context."""

    code: str
    words: str
    param: str | None = None
    details: Mapping[str, int] = field(default_factory=dict)


_OPENING, _CLOSING = "[llmserve ", "] "


def write(failure: Failure) -> str:
    """Return what Triton sends for a failure.

    >>> write(Failure("invalid_value", "top_k takes a whole number, not 'x'", "top_k"))
    "[llmserve invalid_value param=top_k] top_k takes a whole number, not 'x'"
    """
    # A parameter's name may come from the request: only a plain one cannot end the prefix.
    named = [f"param={failure.param}"] if failure.param and _is_plain(failure.param) else []
    numbers = [f"{name}={value}" for name, value in failure.details.items()]
    return _OPENING + " ".join([failure.code, *named, *numbers]) + _CLOSING + failure.words


def read(text: str) -> Failure:
    """Read what Triton sent; words without a code, and a code that is no row, are ``unknown``.

    >>> read("in ensemble 'm', [llmserve no_memory] too much at once").code
    'no_memory'
    """
    words = without_wrappers(text)
    opening, _, rest = words.partition("]")
    if opening.startswith(_OPENING):
        code, *pairs = opening.removeprefix(_OPENING).split(" ")
        named = dict(_pairs(pairs))
        param = named.pop("param", None)
        details = {name: int(value) for name, value in named.items() if _is_number(value)}
        return Failure(code if code in FAILURES else UNKNOWN, rest.lstrip(), param, details)
    return Failure(UNKNOWN, words)


def without_wrappers(text: str) -> str:
    """Remove what Triton puts in front of a model's own words.

    >>> without_wrappers("in ensemble 'm', [request id: 7] too long")
    'too long'
    """
    return list(_layers(text))[-1].strip()


def is_raised(text: str) -> bool:
    """Return whether Triton says that a Python model did not handle an exception."""
    return any(layer.startswith(_RAISED) for layer in _layers(text))


_ENSEMBLE, _EXCEPTION = "in ensemble '", "TritonModelException: "
_RAISED = "Failed to process the request(s) for model"
_REQUEST_ID = "[request id: "
_MOST_LAYERS = 16


def _layers(text: str) -> Iterator[str]:
    """Yield a message, and what is left of it without one more wrapper each time."""
    inner: str | None = text
    # A model that is not ours may quote a request with thousands of them.
    for _ in range(_MOST_LAYERS):
        if inner is None:
            return
        yield (inner := inner.lstrip())
        inner = _unwrapped(inner)


def _unwrapped(text: str) -> str | None:
    if text.startswith(_EXCEPTION):
        return text.removeprefix(_EXCEPTION)
    if text.startswith(_ENSEMBLE):
        return _after(text, "', ")
    if text.startswith(_RAISED):
        return _after(text, ", message: ")
    if text.startswith(_REQUEST_ID):
        # The sender chooses the id: only one like ours, or none, can be told from what follows it.
        number, _, rest = text.removeprefix(_REQUEST_ID).partition(_CLOSING)
        return rest if number == "<id_unknown>" or _is_number(number) else None
    return None


def _after(text: str, end: str) -> str | None:
    _, found, rest = text.partition(end)
    return rest if found else None


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        name, _, value = word.partition("=")
        yield name, value


def _is_plain(name: str) -> bool:
    return name.isascii() and name.replace("_", "").replace(".", "").isalnum()


def _is_number(text: str) -> bool:
    # int() refuses numbers of thousands of digits.
    return text.isascii() and text.isdigit() and len(text) < 20
