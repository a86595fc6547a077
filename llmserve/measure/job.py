"""What a load generator is told before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmserve.client.model import ModelInfo

GIVE_UP = 10.0
"""Seconds after which a load ends where nobody answers at all; a restart may take some."""


@dataclass(frozen=True)
class Ask:
    """A request to be sent; ``at`` is when, in seconds from the start, under a rate."""

    index: int
    prompt: str
    options: Mapping[str, Any]
    at: float | None = None


@dataclass(frozen=True)
class Place:
    """Where the server is, as ``connect`` takes it."""

    url: str
    tls: bool = False
    root_certificates: str | None = None
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Job:
    """One process's share of a load.

    With ``concurrency`` so many requests are kept under way, else each is sent at its time. With
    ``duration`` the requests are repeated until it is over, else each is sent once. ``total`` is
    how many there are in all shares, so that repeated requests get numbers of their own. After
    ``give_up`` seconds without any server it ends.
    """

    place: Place
    model: ModelInfo
    stream: bool
    timeout: float | None
    concurrency: int | None
    duration: float | None
    total: int
    warmup: tuple[Ask, ...]
    asks: tuple[Ask, ...]
    give_up: float = GIVE_UP


def split(job: Job, processes: int) -> list[Job]:
    """Deal a load out to processes, so that together they do what one would."""
    processes = min(processes, job.concurrency or processes, len(job.asks))
    return [
        replace(
            job,
            concurrency=job.concurrency and len(range(at, job.concurrency, processes)),
            warmup=job.warmup[at::processes],
            asks=job.asks[at::processes],
        )
        for at in range(processes)
    ]
