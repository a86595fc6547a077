"""What is known of a file and of a batch: as the API shows it, and as it is kept."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmserve_gateway.errors import bad_request

UNFINISHED = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_MOMENTS = (
    "in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling",
    "cancelled",
)  # fmt: skip
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_LONGEST = 30 * 86400
"""As long as OpenAI keeps a file that says when it expires."""


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


@dataclass
class StoredFile:
    """A file of a key."""

    id: str
    owner: str
    filename: str
    bytes: int
    purpose: str
    created_at: int
    expires_at: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass
class Batch:
    """A batch of a key: a file of requests, and what has come of it."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str
    """The name that its results will have."""
    error_id: str
    metadata: dict[str, str] | None = None
    keep_seconds: int | None = None
    """How long its results are kept; None is until they are deleted."""
    status: str = "validating"
    moments: dict[str, int] = field(default_factory=dict)
    """When it got into each status."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    is_being_checked: bool = False
    """Whether its file is being read for the first time, by this gateway or by one that died."""
    has_output: bool = False
    has_errors: bool = False
    has_expired: bool = False
    """Whether its time was over before all was answered; some lines may have an error for it."""
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def is_unfinished(self) -> bool:
        return self.status in UNFINISHED

    @property
    def result_ids(self) -> tuple[str, str]:
        return self.output_id, self.error_id

    def become(self, status: str, now: float) -> None:
        self.status = status
        # A thread may be writing the ones before.
        self.moments = {**self.moments, status: int(now)}

    def as_json(self) -> dict[str, Any]:
        moments = {**self.moments, "expires": self.expires_at}
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            **{f"{name}_at": moments.get(name) for name in _MOMENTS},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }


def read_window(text: str) -> int:
    """Return the seconds of a completion window.

    >>> read_window("24h"), read_window("30m")
    (86400, 1800)
    """
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST:
        raise bad_request("completion_window is a time such as 24h, at most 30d",
                          "completion_window")  # fmt: skip
    return seconds


EXPIRY: Mapping[str, Any] = {
    "type": "object",
    "required": ["anchor", "seconds"],
    "properties": {
        "anchor": {"const": "created_at"},
        "seconds": {"type": "integer", "minimum": 3600, "maximum": _LONGEST},
    },
}


def read_expiry(anchor: Any, seconds: Any, name: str) -> int:
    """Return the seconds after which a file expires that is made now."""
    if anchor != "created_at":
        raise bad_request(f"{name} counts from created_at", f"{name}.anchor")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 9:
        seconds = int(seconds)
    if type(seconds) is not int or not 3600 <= seconds <= _LONGEST:
        raise bad_request(f"{name} is 3600 to {_LONGEST} seconds", f"{name}.seconds")
    return seconds
