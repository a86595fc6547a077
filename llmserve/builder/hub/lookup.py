"""Where a model of the hub is looked up: there, or in the cache if the hub does not answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmserve.builder.hub.failures import HubError
from llmserve.builder.hub.listing import Listing, ask
from llmserve.builder.progress import Note

PROMPT = 3.0
"""The seconds that a model which is here may wait for the hub."""


def look_up(
    repo_id: str, file: str, *, revision: str, report: Callable[[str], None]
) -> Listing | Path:
    """Return what the hub has of a model, or its folder in the cache if the hub does not say it.

    A model is in the cache if this ``file`` of it is.
    """
    here = cached(repo_id, revision, file)
    if here is None:
        return ask(repo_id, revision, report=report)
    try:
        return ask(repo_id, revision, timeout=PROMPT)
    except HubError as error:
        if not error.cached_will_do:
            raise
        if error.reason:
            report(Note(f"{error.reason}: {repo_id} is taken from the cache"))
        return here


def cached(repo_id: str, revision: str, file: str = "config.json") -> Path | None:
    """Return the folder of a commit that was downloaded before, None if there is none."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(repo_id, file, revision=revision or None)
    except HFValidationError:
        return None
    return Path(found).parents[file.count("/")] if isinstance(found, str) else None
