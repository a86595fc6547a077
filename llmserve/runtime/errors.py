"""Errors of the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RequestError(Exception):
    """A request that cannot be served; the message is one line for the user who sent it.

    The user has to fix it, so Triton answers 400 / INVALID_ARGUMENT and nothing is logged as a
    failure of the server.
    """


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
