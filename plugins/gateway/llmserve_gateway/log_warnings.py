"""Warnings in the gateway's log, each of which is logged once."""

from __future__ import annotations

import logging

log = logging.getLogger("llmserve.gateway")

_MAX_WARNED_FIELDS = 1000
_MAX_WARNED_LENGTH = 60
_MAX_NAMED_FIELDS = 20


class LogWarnings:
    """Logs what clients and models should be warned of, and remembers of what it did."""

    def __init__(self) -> None:
        self._fields: set[str] = set()
        self._models: set[str] = set()

    def warn_of_fields(self, unknown: frozenset[str]) -> None:
        """Log a warning about unknown fields, once for each field."""
        new = {name for name in unknown if len(name) <= _MAX_WARNED_LENGTH} - self._fields
        if new and len(self._fields) < _MAX_WARNED_FIELDS:
            named = sorted(new)[:_MAX_NAMED_FIELDS]
            self._fields.update(named)
            names = ", ".join(repr(name) for name in named)
            others = f" and {len(new) - len(named)} more" if len(new) > len(named) else ""
            log.warning("ignored unknown request fields: %s%s", names, others)

    def warn_of_message(self, model: str) -> None:
        """Log, once for each model, that a message describes tools to it."""
        if model not in self._models:
            self._models.add(model)
            log.warning(
                "the chat template of %r has no place for tools: a message describes them "
                "(--tool-prompt FILE sets its text)",
                model,
            )
