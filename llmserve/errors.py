"""Every error llmserve raises on purpose, in one tree.

An error is one line that says what is wrong, and ``mend``, where there is one,
says what to do about it. The command line prints both and exits with
``exit_code``. Anything else that is raised is a bug, and reported as one.
"""

from __future__ import annotations

import os
import sys

TRACEBACK = "LLMSERVE_TRACEBACK"
"""Set, it shows where in somebody's code an error was raised."""


class LLMServeError(Exception):
    """The root of the tree."""

    exit_code = 1

    def __init__(self, problem: str, *, mend: str | None = None) -> None:
        self.problem = problem
        self.mend = mend
        super().__init__(f"{problem}: {mend}" if mend else problem)


class UsageError(LLMServeError):
    """An argument that cannot be meant."""

    exit_code = 2


class OptionError(UsageError):
    """An option that no component knows, or a value of the wrong type or range."""


class PluginError(LLMServeError):
    """A plugin that is missing, broken, blocked or clashes with another."""

    exit_code = 3


class ConfigError(LLMServeError):
    """A repository, a manifest or a ``config.pbtxt`` that is wrong."""

    exit_code = 3


class ModelSourceError(ConfigError):
    """``--model`` names nothing that can be served."""


class IncompatibleError(ConfigError):
    """Components that cannot work together; the mend names those that can."""


class OutputError(ConfigError):
    """The output folder holds something that a build must not touch."""


class ServerError(LLMServeError):
    """A Triton that could not be found, started or kept alive."""


class PortInUseError(ServerError):
    """Somebody else listens on a port that was asked for."""


class ClientError(LLMServeError):
    """A request that did not come through."""


class UnreachableError(ClientError):
    """No server answers at the URL."""

    exit_code = 4


class ModelNotReadyError(ClientError):
    """The server does not have the model, or has not loaded it yet."""

    exit_code = 5


class RequestTimeoutError(ClientError):
    """The time that was given is over."""

    exit_code = 6


class RequestRejectedError(ClientError):
    """The server refused the request and said why."""

    exit_code = 7


class RequestCancelledError(ClientError):
    """The request was cancelled before it was complete."""

    exit_code = 130


def reason(error: BaseException) -> str:
    """Say in one line what went wrong in a plugin's code, which is not ours to mend."""
    if isinstance(error, LLMServeError):
        return str(error)
    if os.environ.get(TRACEBACK):
        sys.excepthook(type(error), error, error.__traceback__)
    first = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
