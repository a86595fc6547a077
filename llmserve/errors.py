"""All errors that llmserve raises on purpose.

An error is one line that describes the problem, and ``hint``, if there is one,
describes the fix. The command line prints both and exits with ``exit_code``.
Any other exception is a bug, and reported as one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

from llmserve.contract import failures
from llmserve.texts import printable

TRACEBACK = "LLMSERVE_TRACEBACK"
"""The environment variable that makes llmserve print tracebacks."""


class LLMServeError(Exception):
    """The base class of all errors of llmserve."""

    exit_code = 1

    def __init__(self, problem: str, *, hint: str | None = None) -> None:
        self.problem = problem
        self.hint = hint
        super().__init__(f"{problem}: {hint}" if hint else problem)


class UsageError(LLMServeError):
    """An invalid argument."""

    exit_code = 2


class OptionError(UsageError):
    """An option that no component has, or a value of the wrong type or out of range."""


class PluginError(LLMServeError):
    """A plugin that is missing, broken, blocked or in conflict with another."""

    exit_code = 3


class MissingPluginError(PluginError):
    """No installed package has a component of this name."""

    def __init__(self, problem: str, *, hint: str | None = None, name: str = "") -> None:
        super().__init__(problem, hint=hint)
        self.name = name


class ConfigError(LLMServeError):
    """An invalid repository, manifest or ``config.pbtxt``."""

    exit_code = 3


class ModelSourceError(ConfigError):
    """``--model`` does not name a model that can be served."""


class ModelKindError(ModelSourceError):
    """A model of another kind than the generator is for; it names its ``architectures``."""

    def __init__(
        self, problem: str, architectures: Iterable[str] = (), *, hint: str | None = None
    ) -> None:
        super().__init__(problem, hint=hint)
        self.architectures = tuple(architectures)


class UnservedError(ModelSourceError):
    """A model with a part that the generator cannot compute; ``hint`` names a plugin that can."""


class IncompatibleError(ConfigError):
    """Components that cannot work together; ``hint`` names ones that can."""


class OutputError(ConfigError):
    """The output folder contains something that a build must not touch."""


class ShortageError(LLMServeError):
    """A model that does not fit into this machine's memory; ``hint`` names what would."""

    exit_code = 3


class ServerError(LLMServeError):
    """A Triton that could not be found, started or kept alive."""


class PortInUseError(ServerError):
    """Another process listens on a requested port."""


class ClientError(LLMServeError):
    """A request that failed, with one of the codes of ``llmserve.contract.failures``.

    ``param`` is the option that is at fault, if the server names one; ``details`` are numbers, such
    as the ``context`` of the model; ``words`` are the server's, if they explain the failure.
    """

    code = "bad_answer"

    def __init__(
        self,
        problem: str,
        *,
        hint: str | None = None,
        code: str | None = None,
        param: str | None = None,
        details: Mapping[str, int] | None = None,
        words: str = "",
    ) -> None:
        super().__init__(problem, hint=hint)
        self.code = code or self.code
        self.param, self.details, self.words = param, dict(details or {}), words

    @property
    def row(self) -> failures.Row:
        """What the code means, with the HTTP status for it."""
        return failures.FAILURES.get(self.code, failures.FAILURES[failures.UNKNOWN])


class UnreachableError(ClientError):
    """No server answers at the URL."""

    code = "unreachable"
    exit_code = 4


class ModelNotReadyError(ClientError):
    """The server does not have the model, or has not loaded it yet."""

    code = "not_ready"
    exit_code = 5


class NotLoadedError(ClientError):
    """A model that ``serve --on-demand`` offers, but could not load."""

    code = "not_loaded"
    exit_code = 5


class RequestTimeoutError(ClientError):
    """The request's time limit has passed."""

    code = "timeout"
    exit_code = 6


class RequestRejectedError(ClientError):
    """The server refused the request and gave a reason."""

    code = "unknown"
    exit_code = 7


class InvalidRequestError(RequestRejectedError):
    """The request is at fault: its ``param``, if the server names one."""

    code = "invalid_request"


class UnsupportedOptionError(InvalidRequestError):
    """The model does not have the option that ``param`` names."""

    code = "unsupported_option"


class ContextLengthError(InvalidRequestError):
    """The prompt and its answer do not fit the model's context."""

    code = "context_length_exceeded"


class QueueFullError(RequestRejectedError):
    """Too many requests wait; the same one may succeed later."""

    code = "queue_full"


class ModelDiedError(RequestRejectedError):
    """The process that runs the model has died; ``llmserve serve`` starts it again."""

    code = "model_died"


class ModelFailedError(RequestRejectedError):
    """The model raised an error; the server's log has the traceback."""

    code = "model_failed"


class RequestCancelledError(ClientError):
    """The request was cancelled before it was complete."""

    code = "cancelled"
    exit_code = 130


def reason(error: BaseException) -> str:
    """Describe in one line an error that plugin code raised."""
    if isinstance(error, LLMServeError):
        return str(error)
    if os.environ.get(TRACEBACK):
        sys.excepthook(type(error), error, error.__traceback__)
    try:
        first = printable(" ".join(str(error).split())[:300])
    except Exception:
        # Its own description fails too.
        first = ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
