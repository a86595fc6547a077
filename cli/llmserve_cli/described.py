"""What is known of a server's models besides their states: what they are, and which it has not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llmserve.errors import LLMServeError
from llmserve.server import Running
from llmserve_cli.listing import folder_size

if TYPE_CHECKING:
    from llmserve.repository.repository import Repository

_SECONDS = 2.0
"""How long a model has to say its context; a busy one may be silent longer."""


def described(server: Running) -> dict[str, Any]:
    """Return a server's status with plugin, size and context of its models.

    Those of its repository that it has not loaded are models as well, which are unloaded.
    """
    from llmserve.repository.repository import Repository

    if "models" not in server.status:
        return server.status
    repository = Repository.open(server.repository)
    parts = {part for model in repository for part in model.parts}
    others = [
        {"name": model.name, "state": "unloaded", "why": "", "restarts": 0,
         "note": f"llmserve reload {model.name} loads it"}
        for model in repository
        if (model.folder / "config.pbtxt").is_file() and model.name not in server.models
        and model.name not in parts
    ]  # fmt: skip
    models = [*server.status["models"], *others]
    answering = [model["name"] for model in models if model["state"] == "ready"]
    contexts = asyncio.run(_contexts(server.url, answering))
    return {
        **server.status,
        "models": [{**model, **_of(repository, model["name"], contexts)} for model in models],
    }


def _of(repository: Repository, name: str, contexts: dict[str, int | None]) -> dict[str, Any]:
    """Return what a model is; what is not known, as of one that somebody else built, is None."""
    manifest = repository.model(name).manifest
    folders = [repository.path / part for part in repository.with_parts([name])]
    return {
        "plugin": manifest.recipe if manifest else None,
        "disk": folder_size(folders),
        "context": contexts.get(name),
    }


async def _contexts(url: str, names: Sequence[str]) -> dict[str, int | None]:
    """Ask the models themselves: some serve less than their checkpoint says."""
    from llmserve.client import connect_async

    if not (url and names):
        return {}
    async with connect_async(url, timeout=_SECONDS) as client:

        async def ask(name: str) -> int | None:
            # Whoever does not say it, or is another's, has none that is known.
            with suppress(LLMServeError, ValueError, KeyError, TypeError):
                if not (await client.model(name)).made_by_llmserve:
                    return None
                asked: dict[str, Any] = {"prompt_only": True, "max_tokens": 1}
                answer = await client.generate(name, "", **asked)
                length = json.loads(answer.text)["context_length"]
                return length if isinstance(length, int) else None
            return None

        lengths = await asyncio.gather(*map(ask, names))
    return dict(zip(names, lengths, strict=True))
