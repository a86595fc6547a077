"""What is wrong: the one form in which checks, servers, plugins and the registry report it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from llmserve.errors import (
    ConfigError,
    LLMServeError,
    PluginError,
    PortInUseError,
    ServerError,
    UsageError,
)

# The most specific first.
_ERRORS: dict[str, type[LLMServeError]] = {
    "port_in_use": PortInUseError,
    "server": ServerError,
    "plugin": PluginError,
    "usage": UsageError,
    "config": ConfigError,
}


@dataclass(frozen=True, init=False)
class Problem:
    """A problem, and how to fix it.

    ``where`` is the model that has it, or whatever else; it is empty if ``message`` says it all.
    ``fatal`` problems keep the model from loading, or the server from starting; the others are
    notes. ``code`` is the kind: ``config``, ``usage``, ``plugin``, ``server`` or ``port_in_use``.

    >>> str(Problem("demo", "it has no version folder", "put its files into a folder 1/"))
    'demo: it has no version folder: put its files into a folder 1/'
    """

    where: str
    message: str
    mend: str
    fatal: bool
    code: str

    def __init__(
        self,
        where: str = "",
        message: str = "",
        mend: str = "",
        fatal: bool = True,
        code: str = "config",
        *,
        model: str = "",
        what: str = "",
    ) -> None:
        """``model`` and ``what`` are the first two in version 2 of the plugin API."""
        values = (where or model, message or what, mend, fatal, code)
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    @classmethod
    def of(cls, error: LLMServeError, where: str = "", *, mend: str = "") -> Problem:
        """Return the problem that an error reports."""
        code = next((code for code, kind in _ERRORS.items() if isinstance(error, kind)), "server")
        return cls(where, error.problem, error.mend or mend, code=code)

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.where, self.message, self.mend)))

    def error(self) -> LLMServeError:
        """Return the error that stops a command because of this problem."""
        kind = _ERRORS.get(self.code, ConfigError)
        return kind(": ".join(filter(None, (self.where, self.message))), mend=self.mend or None)

    @property
    def model(self) -> str:
        """The name of ``where`` in version 2 of the plugin API."""
        return self.where

    @property
    def what(self) -> str:
        """The name of ``message`` in version 2 of the plugin API."""
        return self.message
