"""What can be asked, and whether it answers: each model is asked a token when nobody else asks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve.client.model import ModelInfo
from llmserve.errors import (
    LLMServeError,
    ModelNotReadyError,
    RequestRejectedError,
    ServerError,
)
from llmserve.server.control import ask
from llmserve_gateway.errors import ApiError, from_llmserve
from llmserve_gateway.replicas import Replicas, is_of_the_replica

CANARY_SECONDS = 30.0
"""How long a model may take for one token."""
_QUICK_SECONDS = 5.0
_LONGEST_NAME = 200
"""A folder's name is no longer, and what is much longer breaks a call of gRPC's."""
_MISSES = 2
_SERVING = ("ready", "suspect")


@dataclass
class Health:
    """What is known of a model: when it last answered, and how often it has not since."""

    answered: float = 0.0
    misses: int = 0
    why: str = ""
    told: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def ready(self) -> bool:
        """Whether it answers, as far as anybody knows."""
        return self.misses < _MISSES

    def miss(self, why: str, *, certain: bool = False) -> None:
        self.misses = _MISSES if certain else self.misses + 1
        self.why = why


class Catalog:
    """The models of a Triton; ``named`` are those to offer, all of them where none is."""

    def __init__(
        self,
        client: Callable[[], Replicas],
        named: Sequence[str] = (),
        supervisor: Path | None = None,
    ) -> None:
        self._client = client
        self._named = named
        self._supervisor = supervisor
        self._health: dict[str, Health] = {}

    @property
    def known(self) -> list[str]:
        """The models of whose health something is known."""
        return list(self._health)

    async def offered(self, *, anew: bool = False) -> list[ModelInfo]:
        """Return what is loaded, takes text, gives text, and is no part of something else."""
        client = self._client()
        names = self._named or await client.models()
        found = []
        for name in names:
            # One that does not load hides none of the others.
            with suppress(RequestRejectedError):
                if not self._named or await client.model_ready(name):
                    found.append(await client.model(name, anew=anew))
        if self._named and not found:
            with suppress(RequestRejectedError, ModelNotReadyError):
                # Whether a model is ready does not tell whether there is a Triton at all.
                await client.model(self._named[0], anew=True)
        parts = {part for info in found for part in info.parts}
        return [
            info
            for info in found
            if "text_input" in info.inputs
            and "text_output" in info.outputs
            and info.name not in parts
        ]

    async def info(self, name: str) -> ModelInfo:
        """Return a model that can be asked, or say that there is none."""
        if len(name) > _LONGEST_NAME or (self._named and name not in self._named):
            choice = f": choose one of {', '.join(self._named)}" if self._named else ""
            raise ApiError(
                404,
                f"there is no model {name[:_LONGEST_NAME]!r}{choice}",
                param="model",
                code="model_not_found",
            )
        try:
            return await self._client().model(name)
        except ModelNotReadyError as error:
            # Triton counts the parts of ensembles among what it has.
            if not (names := [info.name for info in await self.offered()]):
                raise
            mend = f"choose one of {', '.join(names)}"
            raise ModelNotReadyError(error.problem, mend=mend) from None

    async def about(self, name: str, prompt: str = "", **options: Any) -> dict[str, Any]:
        """Ask what a prompt is to a model: its ``ids``, their ``text``, ``context_length``."""
        info = await self.info(name)
        strange = ApiError(400, f"{name!r} does not tell how it reads a prompt", param="model")
        if not info.made_by_llmserve:
            raise strange
        answer = await self._client().generate(
            name, prompt, prompt_only=True, max_tokens=1, timeout=CANARY_SECONDS, **options
        )
        try:
            about = json.loads(answer.text)
            kept = {key: about[key] for key in ("ids", "text", "context_length")}
            return {**kept, "chat_template": about.get("chat_template")}
        except (ValueError, KeyError, TypeError):
            raise strange from None  # An older one, which has answered.

    async def context_length(self, name: str) -> int | None:
        """Return how many tokens prompt and answer may have together, where the model tells."""
        length: int | None = (await self._told(name)).get("context_length")
        return length

    async def chat_template(self, name: str) -> str | None:
        """Return the text of a model's chat template, where the model tells it."""
        template = (await self._told(name)).get("chat_template")
        return template if isinstance(template, str) else None

    async def _told(self, name: str) -> dict[str, Any]:
        """Return what a model tells of itself; :meth:`watch` asks again."""
        health = self.health(name)
        if health.told is None:
            await self._learn(name)
        return health.told or {}

    async def _learn(self, name: str) -> None:
        with suppress(LLMServeError, asyncio.TimeoutError):
            try:
                told = await asyncio.wait_for(self.about(name), _QUICK_SECONDS)
            except (RequestRejectedError, ApiError):
                told = {}
            self.health(name).told = told

    async def by_model(self, told: Mapping[str, float]) -> dict[str, float]:
        """Return figures that models or their parts tell, by the models."""
        found: dict[str, float] = {}
        for name in self.known if told else ():
            with suppress(LLMServeError):
                parts = (await self._client().model(name)).parts
                found.update((name, told[part]) for part in (name, *parts) if part in told)
        return found

    # Whether they answer

    def health(self, name: str) -> Health:
        return self._health.setdefault(name, Health())

    def answered(self, name: str) -> None:
        """Take note that a model has just answered."""
        health = self.health(name)
        health.answered, health.misses = time.monotonic(), 0

    def failed(self, name: str, error: LLMServeError) -> None:
        """Take note of an answer that did not come."""
        if is_of_the_replica(error) and self._client().answers(name):
            return  # There are others.
        if from_llmserve(error).status >= 500:
            self.health(name).miss(str(error), certain="has died" in str(error))

    async def watch(self, interval: float) -> None:
        """Ask each model for a token, again and again, unless it answers others anyway.

        What a model has told of itself is asked again too, for it may have been built anew.
        """
        while True:
            with suppress(LLMServeError):
                names = [info.name for info in await self.offered(anew=True)]
                now = time.monotonic()
                quiet = [name for name in names if now - self.health(name).answered >= interval]
                known = [name for name in names if self.health(name).told is not None]
                await asyncio.gather(*map(self._canary, quiet), *map(self._learn, known))
            await asyncio.sleep(interval)

    async def _canary(self, name: str) -> None:
        sent = time.monotonic()
        try:
            await self._client().generate(name, "Hi", max_tokens=1, timeout=CANARY_SECONDS)
        except LLMServeError as error:
            # A refusal is an answer too, and one that is only busy has answered others since.
            if self.health(name).answered < sent and from_llmserve(error).status >= 500:
                self.failed(name, error)
                return
        self.answered(name)

    async def supervised(self) -> list[dict[str, Any]]:
        """Return what ``serve`` tells of each model, where it has started this gateway.

        It sees the death of a model's process at once, which a canary sees when it is sent.
        """
        if self._supervisor is None:
            return []
        try:
            told = await asyncio.to_thread(ask, self._supervisor, {"do": "status"}, _QUICK_SECONDS)
        except ServerError:
            return []
        models: list[dict[str, Any]] = told.get("models", [])
        return models

    async def state(self) -> dict[str, Any]:
        """Return whether anything can be asked, and how each model is."""
        try:
            offered = await asyncio.wait_for(self.offered(), 2)
        except (LLMServeError, asyncio.TimeoutError) as error:
            return {"ready": False, "why": str(error) or "no answer in 2 s", "models": {}}
        gone = {
            one["name"]: f"{one['state']}: {one['why']}"
            for one in await self.supervised()
            if one["state"] not in _SERVING
        }
        models: dict[str, dict[str, Any]] = {}
        for info in offered:
            health = self.health(info.name)
            lost = [gone[name] for name in (info.name, *info.parts) if name in gone]
            models[info.name] = {"ready": health.ready and not lost}
            if not models[info.name]["ready"]:
                models[info.name]["why"] = lost[0] if lost else health.why
        for name in self._named:
            models.setdefault(name, {"ready": False, "why": "it is not loaded, or takes no text"})
        state: dict[str, Any] = {
            "ready": any(one["ready"] for one in models.values()),
            "models": models,
        }
        if not models:
            state["why"] = "no model is loaded"
        return state
