"""What is known of a server's models besides their states: what they are, and which it has not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from llmserve.errors import LLMServeError
from llmserve.server import ModelReport, Running, ServerReport, State
from llmserve_cli.listing import folder_size

if TYPE_CHECKING:
    from llmserve.plugin import Repository

_SECONDS = 2.0
"""How long a model has to say its context; a busy one may be silent longer."""


@dataclass(frozen=True)
class Description:
    """What a model is; what is not known, as of one that somebody else built, is None."""

    plugin: str | None = None
    disk: int = 0
    """The bytes of its files."""
    context: int | None = None


@dataclass(frozen=True)
class Described:
    """A server's report, with what its models are."""

    report: ServerReport
    models: Mapping[str, Description]

    def of(self, name: str) -> Description:
        return self.models.get(name, Description())

    def to_json(self) -> dict[str, Any]:
        content = self.report.to_json()
        models = ({**model, **asdict(self.of(model["name"]))} for model in content["models"])
        return {**content, "models": [*models]}


def described(server: Running) -> Described:
    """Return a server's report with plugin, size and context of its models.

    Those of its repository that it has not loaded are models as well, which are unloaded.
    """
    from llmserve.plugin import Repository

    if server.is_silent:
        return Described(server.report, {})
    repository = Repository.open(server.repository)
    parts = {part for model in repository for part in model.parts}
    others = (
        ModelReport(model.name, State.UNLOADED, note=f"llmserve reload {model.name} loads it")
        for model in repository
        if (model.folder / "config.pbtxt").is_file() and model.name not in server.models
        and model.name not in parts
    )  # fmt: skip
    report = replace(server.report, models=(*server.report.models, *others))
    answering = [model.name for model in report.models if model.state is State.READY]
    contexts = asyncio.run(_contexts(server.url, answering))
    names = [model.name for model in report.models]
    return Described(report, {name: _of(repository, name, contexts) for name in names})


def _of(repository: Repository, name: str, contexts: dict[str, int | None]) -> Description:
    manifest = repository.model(name).manifest
    folders = [repository.path / part for part in repository.with_parts([name])]
    recipe = manifest.recipe if manifest else None
    return Description(recipe, folder_size(folders), contexts.get(name))


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
