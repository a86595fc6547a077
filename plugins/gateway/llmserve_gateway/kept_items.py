"""Items of conversations that are kept, and what is said where there are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmserve_gateway.errors import ApiError

Item = Mapping[str, Any]
"""An item of the input or of the output, as clients send and get it."""


def missing(kind: str, id: str) -> ApiError:
    return ApiError(404, f"there is no {kind} {id[:80]!r}", code="not_found")


def too_long(name: str) -> ApiError:
    what = f"{name}: the conversation is too long to go on"
    return ApiError(413, what, param=name, code="request_too_large")


class StoreError(ApiError):
    """What is kept cannot be reached now; ``problem`` says why, for the log alone."""

    def __init__(self, problem: str) -> None:
        what = "what is kept cannot be read or changed now: ask again"
        super().__init__(503, what, code="store_unavailable", headers={"retry-after": "5"})
        self.problem = problem
