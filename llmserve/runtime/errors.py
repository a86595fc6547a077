"""Errors of the runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from llmserve.contract.failures import FAILURES, UNKNOWN, Failure, read


class RequestError(Exception):
    """A request that cannot be served; the message is one line for the user who sent it.

    The user has to fix it, so Triton answers 400 / INVALID_ARGUMENT and nothing is logged as a
    failure of the server. ``code`` is one of ``llmserve.contract.failures``, ``param`` the option
    that is at fault, and ``details`` are numbers that a program may need.
    """

    # A subclass of a plugin may have a constructor of its own that does not call this one.
    code = "invalid_request"
    param: str | None = None
    details: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        **details: int,
    ) -> None:
        super().__init__(message)
        if code not in FAILURES:
            raise ValueError(f"there is no failure code {code!r}: use one of {', '.join(FAILURES)}")
        self.code, self.param, self.details = code, param, details

    @property
    def failure(self) -> Failure:
        return Failure(self.code, str(self), self.param, self.details)

    def again(self) -> RequestError:
        """Return the same refusal without its traceback, which would keep a request's memory."""
        return _again(self.failure)


def invalid_value(name: str, problem: str) -> RequestError:
    """Return the error for the value of an option; the message begins with the option's name."""
    return RequestError(f"{name} {problem}", code="invalid_value", param=name)


def error_of_model(message: str) -> Exception:
    """Return the error of another model that this one has called, from Triton's message."""
    failure = read(message)
    if failure.code in (UNKNOWN, "model_failed"):
        return RuntimeError(failure.words)
    return _again(failure)


def _again(failure: Failure) -> RequestError:
    error = RequestError(failure.words, code=failure.code, param=failure.param)
    error.details = failure.details
    return error


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Make third-party errors other than ``Exception`` fail one request, not the process.

    A panic in Rust, as in the library ``tokenizers``, is raised as a ``BaseException``.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
