"""The models on offer and their health: each idle model is asked for a token regularly."""

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
    ModelDiedError,
    ModelNotReadyError,
    RequestRejectedError,
    ServerError,
)
from llmserve.server.control import ask
from llmserve_gateway.errors import ApiError, from_llmserve
from llmserve_gateway.replicas import Replicas, is_replica_failure

CANARY_SECONDS = 30.0
"""How long a model may take for one token."""
_QUICK_SECONDS = 5.0
_MAX_NAME = 200
"""Folder names are not longer, and much longer names break a gRPC call."""
_MAX_MISSES = 2
_SERVING = ("ready", "suspect")
_OPTIONAL = ("chat_template", "longest_prompt")
"""What models of older versions do not report about prompts."""


@dataclass
class Health:
    """The health of a model: when it last answered, and how often it has failed since."""

    answered: float = 0.0
    misses: int = 0
    why: str = ""
    description: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def ready(self) -> bool:
        return self.misses < _MAX_MISSES

    def miss(self, why: str, *, certain: bool = False) -> None:
        self.misses = _MAX_MISSES if certain else self.misses + 1
        self.why = why


class Catalog:
    """The models of a Triton server: those that are ``named``, or all of them."""

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
        self._asked: dict[str, asyncio.Future[None]] = {}
        """The models that are describing themselves."""

    @property
    def observed(self) -> list[str]:
        """The models whose health has been observed."""
        return list(self._health)

    def is_observed(self, name: str) -> bool:
        """Return whether a model of this name has been seen, so that it is not just a word."""
        return name in self._health

    async def offered(self, *, refresh: bool = False) -> list[ModelInfo]:
        """Return the loaded models with text input and output that are not part of another."""
        client = self._client()
        names = self._named or await client.models()
        loaded = []
        for name in names:
            # A model that does not load must not hide the others.
            with suppress(RequestRejectedError):
                if not self._named or await client.model_ready(name):
                    loaded.append(await client.model(name, refresh=refresh))
        if self._named and not loaded:
            with suppress(RequestRejectedError, ModelNotReadyError):
                # model_ready() does not reveal that there is no Triton at all; this call does.
                await client.model(self._named[0], refresh=True)
        parts = {part for info in loaded for part in info.parts}
        return [
            info
            for info in loaded
            if "text_input" in info.inputs
            and "text_output" in info.outputs
            and info.name not in parts
        ]

    async def info(self, name: str) -> ModelInfo:
        """Return a model that accepts requests, or raise if there is none of this name."""
        if len(name) > _MAX_NAME or (self._named and name not in self._named):
            choices = f": choose one of {', '.join(self._named)}" if self._named else ""
            raise ApiError(
                404,
                f"there is no model {name[:_MAX_NAME]!r}{choices}",
                param="model",
                code="model_not_found",
            )
        try:
            return await self._client().model(name)
        except ModelNotReadyError as error:
            # Triton's own list includes the parts of ensembles.
            names = [info.name for info in await self.offered()]
            if self.is_observed(name) and (not names or name in await self._down()):
                # It is being loaded again, or Triton is about to end.
                raise ApiError(
                    503,
                    f"{name!r} is not loaded at the moment",
                    code="backend_unavailable",
                    headers={"retry-after": "2"},
                ) from None
            if not names:
                raise
            mend = f"choose one of {', '.join(names)}"
            raise ModelNotReadyError(error.problem, mend=mend) from None

    async def inspect_prompt(self, name: str, prompt: str = "", **options: Any) -> dict[str, Any]:
        """Ask a model for the ``ids`` of a prompt, their ``text`` and its ``context_length``."""
        info = await self.info(name)
        unsupported = ApiError(400, f"{name!r} does not report how it tokenizes", param="model")
        if not info.made_by_llmserve:
            raise unsupported
        answer = await self._client().generate(
            name, prompt, prompt_only=True, max_tokens=1, timeout=CANARY_SECONDS, **options
        )
        try:
            report = json.loads(answer.text)
            required = {key: report[key] for key in ("ids", "text", "context_length")}
            return {**required, **{key: report.get(key) for key in _OPTIONAL}}
        except (ValueError, KeyError, TypeError):
            # A model from an older llmserve has answered the prompt instead.
            raise unsupported from None

    async def context_length(self, name: str) -> int | None:
        """Return the limit of prompt and answer tokens together, if the model reports it."""
        length: int | None = (await self._description(name)).get("context_length")
        return length

    async def longest_prompt(self, name: str) -> int | None:
        """Return how many characters a prompt may have at most, if the model reports it."""
        length: int | None = (await self._description(name)).get("longest_prompt")
        return length

    async def chat_template(self, name: str) -> str | None:
        """Return the text of a model's chat template, if the model reports it."""
        template = (await self._description(name)).get("chat_template")
        return template if isinstance(template, str) else None

    async def _description(self, name: str) -> dict[str, Any]:
        """Return what a model reports about itself; :meth:`watch` keeps it up to date."""
        health = self.health(name)
        if health.description is None:
            if (asked := self._asked.get(name)) is None:
                # Who asks meanwhile waits for the same answer, even if this request is cancelled.
                asked = self._asked[name] = asyncio.ensure_future(self._describe(name))
                asked.add_done_callback(lambda _: self._asked.pop(name))
            await asyncio.shield(asked)
        return health.description or {}

    async def _describe(self, name: str) -> None:
        with suppress(LLMServeError, asyncio.TimeoutError):
            try:
                report = await asyncio.wait_for(self.inspect_prompt(name), _QUICK_SECONDS)
            except (RequestRejectedError, ApiError):
                report = {}
            self.health(name).description = report

    async def by_model(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the values of models or their parts, keyed by the models."""
        result: dict[str, float] = {}
        for name in self.observed if values else ():
            with suppress(LLMServeError):
                parts = (await self._client().model(name)).parts
                result.update((name, values[part]) for part in (name, *parts) if part in values)
        return result

    # Health

    def health(self, name: str) -> Health:
        return self._health.setdefault(name, Health())

    def record_answer(self, name: str) -> None:
        health = self.health(name)
        health.answered, health.misses = time.monotonic(), 0

    def record_failure(self, name: str, error: LLMServeError) -> None:
        if is_replica_failure(error) and self._client().is_available(name):
            return  # Other replicas serve the model.
        if from_llmserve(error).status >= 500:
            self.health(name).miss(str(error), certain=isinstance(error, ModelDiedError))

    async def watch(self, interval: float) -> None:
        """Repeatedly ask each model for a token, unless it has answered other requests.

        The descriptions of models are refreshed too, because a model may have been rebuilt.
        """
        while True:
            with suppress(LLMServeError):
                names = [info.name for info in await self.offered(refresh=True)]
                now = time.monotonic()
                idle = [name for name in names if now - self.health(name).answered >= interval]
                described = [name for name in names if self.health(name).description is not None]
                await asyncio.gather(*map(self._canary, idle), *map(self._describe, described))
            await asyncio.sleep(interval)

    async def _canary(self, name: str) -> None:
        sent = time.monotonic()
        try:
            await self._client().generate(name, "Hi", max_tokens=1, timeout=CANARY_SECONDS)
        except LLMServeError as error:
            # A refusal is an answer too, and a model that is only busy has answered others since.
            if self.health(name).answered < sent and from_llmserve(error).status >= 500:
                self.record_failure(name, error)
                return
        self.record_answer(name)

    async def supervised(self) -> list[dict[str, Any]]:
        """Return the model states from ``serve``, if it started this gateway.

        ``serve`` notices at once that a model's process has died, a canary only when it is sent.
        """
        if self._supervisor is None:
            return []
        try:
            reply = await asyncio.to_thread(ask, self._supervisor, {"do": "status"}, _QUICK_SECONDS)
        except ServerError:
            return []
        models: list[dict[str, Any]] = reply.get("models", [])
        return models

    async def _down(self) -> dict[str, str]:
        """Return the models that `serve` knows not to serve at the moment, and why."""
        return {
            model["name"]: f"{model['state']}: {model['why']}"
            for model in await self.supervised()
            if model["state"] not in _SERVING
        }

    async def state(self) -> dict[str, Any]:
        """Return whether any model is ready, and the state of each."""
        try:
            offered = await asyncio.wait_for(self.offered(), 2)
        except (LLMServeError, asyncio.TimeoutError) as error:
            return {"ready": False, "why": str(error) or "no answer in 2 s", "models": {}}
        down = await self._down()
        models: dict[str, dict[str, Any]] = {}
        for info in offered:
            health = self.health(info.name)
            reasons = [down[name] for name in (info.name, *info.parts) if name in down]
            models[info.name] = {"ready": health.ready and not reasons}
            if not models[info.name]["ready"]:
                models[info.name]["why"] = reasons[0] if reasons else health.why
        for name in self._named:
            why = "the model is not loaded, or has no text input and output"
            models.setdefault(name, {"ready": False, "why": why})
        state: dict[str, Any] = {
            "ready": any(model["ready"] for model in models.values()),
            "models": models,
        }
        if not models:
            state["why"] = "no model is loaded"
        return state
