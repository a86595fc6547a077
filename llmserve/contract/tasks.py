"""What a model is for: its formatter says it, its manifest and ``config.pbtxt`` record it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PARAMETER = "llmserve.task"
"""The parameter in ``config.pbtxt`` with the task, of models that do not generate text."""
TOKENS = "tokens"
"""What a generator answers with if it generates text; others answer with values."""
GENERATE, EMBED, RERANK, CLASSIFY = "generate", "embed", "rerank", "classify"


@dataclass(frozen=True)
class Task:
    """A task that clients know; a plugin's formatter may have one of its own."""

    name: str
    does: str
    """What a model does, after its name: ``computes embeddings``."""
    call: str
    """The method of a client that asks for it."""


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task(GENERATE, "generates text", "generate()"),
        Task(EMBED, "computes embeddings", "embed()"),
        Task(RERANK, "ranks documents by a query", "rerank()"),
        Task(CLASSIFY, "tells which labels a text has", "classify()"),
    )
}


def task_of(name: str) -> Task:
    """Return a task by its name; one of a plugin is asked for with ``compute()``.

    >>> task_of("embed").does
    'computes embeddings'
    >>> task_of("summarise-audio").does
    'is for summarise-audio'
    """
    return TASKS.get(name) or Task(name, f"is for {name}", "compute()")
