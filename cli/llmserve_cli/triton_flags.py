"""Triton's own options, beside those that `llmserve serve` sets."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmserve.contract.container import NEWEST, TUNING, release
from llmserve.errors import UsageError
from llmserve.plugin import near

_FORM = re.compile(r"(?:--)?([a-z0-9-]+)=([^\x00-\x1f]+)")
_OURS = "shm-region-prefix-name"
"""The setting of a backend that tells apart the shared memory of several servers."""


def triton_arguments(flags: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments for Triton; refuse what serve itself sets, and what opens a port."""
    return tuple(_argument(flag) for flag in flags)


def _argument(flag: str) -> str:
    match = _FORM.fullmatch(flag)
    if match is None:
        raise UsageError(f"--triton-flag takes NAME=VALUE, not {flag!r}", hint="as log-verbose=1")
    name, value = match.groups()
    if name not in TUNING:
        known = name in release(NEWEST).options
        raise UsageError(
            f"--triton-flag does not set {name}: "
            + ("serve itself does, or keeps it closed" if known else "Triton has no such option"),
            hint="llmserve serve --help has its options" if known else near(name, TUNING),
        )
    if _OURS in value:
        raise UsageError(
            f"--triton-flag does not set {_OURS}: serve itself does", hint="leave it out"
        )
    return f"--{name}={value}"
