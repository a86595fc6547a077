"""The models on offer and their health.

The `serve` that has started this gateway asks its models, and this gateway asks it. Without one, it
asks each idle model for a token itself.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from contextvars import Context
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from llmserve.client import ModelInfo
from llmserve.errors import (
    ClientError,
    LLMServeError,
    ModelNotReadyError,
    RequestRejectedError,
    RequestTimeoutError,
    ServerError,
)
from llmserve.runtime.contract import (
    ADAPTER,
    GENERATE,
    IMAGE_URL,
    TEXT_OUTPUT,
    TEXT_PAIR,
    ImageLimits,
)
from llmserve.server import ModelReport, ReplicaReport, State, ask, health
from llmserve_gateway.bodies import MAX_IMAGE_BYTES
from llmserve_gateway.errors import ApiError, from_llmserve
from llmserve_gateway.loads import Loads
from llmserve_gateway.replicas import Replicas, is_replica_failure
from llmserve_gateway.text_requests import IMAGE_TOKENS

_INSPECT_SECONDS = 30.0
"""How long a model may take to report on a prompt."""
_QUICK_SECONDS = 5.0
_MAX_NAME = 200
"""Folder names are not longer, and much longer names break a gRPC call."""
_READING = "it still reads the prompts that it is to have read ahead"
_OPTIONAL = (
    "chat_template",
    "longest_prompt",
    "labels",
    "prompts",
    "special_tokens",
    "fill_in",
    "built",
    "adapters",
    "images",
)
"""What models of older versions do not report about prompts."""

Supervisor = Path | Callable[[], ReplicaReport] | None


@dataclass(frozen=True)
class ImageReport:
    """What a model says of the images that it reads."""

    limits: ImageLimits | None = None
    tokens: int = IMAGE_TOKENS
    """How many tokens it makes of one that has the size of a screen."""


@dataclass
class Health(health.Watch):
    """The state of a model as its answers show it; it is loaded again without notice."""

    state: health.State = health.State.READY
    answers: int = 0
    description: dict[str, Any] | None = field(default=None, repr=False)
    adapters: tuple[str, ...] = ()
    """The names of its adapters when it last said them."""
    described: object = None
    """Of which process the description is, as far as `serve` says."""

    def answered(self, now: float) -> None:
        super().answered(now)
        if not self.alive:
            self.loaded(now)


class _Heard:
    """The answers to the gateway's requests, all that it knows of models that it does not ask."""

    def __init__(self, models: Mapping[str, Health]) -> None:
        self._models = models

    async def answers(self) -> Mapping[str, int]:
        return {name: model.answers for name, model in self._models.items()}

    def seconds(self) -> Mapping[str, float]:
        return {}

    def load_number(self, name: str) -> int:
        del name
        return 0

    def has_processes(self, name: str) -> bool:
        del name
        return False


class Catalog:
    """The models of a Triton server: those that are ``named``, or all of them."""

    def __init__(
        self,
        client: Callable[[], Replicas],
        named: Sequence[str] = (),
        supervisor: Supervisor = None,
        loads: Loads | None = None,
    ) -> None:
        self._client = client
        self._named = named
        self._supervisor = supervisor
        self._loads = loads
        """What has models loaded on demand, if they are."""
        self._models: dict[str, Health] = {}
        self._describing: dict[str, asyncio.Future[None]] = {}
        self._asked: list[Health] = []
        """The models that this gateway asks for a token at the moment."""
        self._monitor = health.Monitor(
            client, lambda: self._asked, _Heard(self._models), slow=health.SLOW_UNSEEN, strict=True
        )

    @property
    def observed(self) -> list[str]:
        """The models whose health has been observed."""
        return list(self._models)

    def is_observed(self, name: str) -> bool:
        """Return whether a model of this name has been seen, so that it is not just a word."""
        return name in self._models

    async def offered(self, *, refresh: bool = False) -> list[ModelInfo]:
        """Return the loaded models that take text and have a task, and are no part of another."""
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
            if "text_input" in info.inputs and info.task and info.name not in parts
        ]

    async def names(self) -> list[str]:
        """Return the models that a request may name, some of which are to be loaded then."""
        if self._loads is None:
            return [info.name for info in await self.offered()]
        return [report.name for report in await self.loadable()]

    async def loadable(self) -> list[ModelReport]:
        """Return what `serve` reports of the models that it loads on demand."""
        if self._loads is None:
            return []
        named = self._named
        return [
            report
            for report in await self.supervised()
            if report.demand and report.demand.task and (not named or report.name in named)
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
            names = await self.names()
            report = await self._report(name)
            if report is not None and report.failure is not None:
                raise from_llmserve(
                    ClientError(f"{name!r} does not answer ({report.why})", code=report.code)
                ) from None
            if self.is_observed(name) and (not names or _is_kept(report)):
                # It is being loaded again, or Triton is about to end.
                raise ApiError(
                    503,
                    f"{name!r} is not loaded at the moment",
                    code="backend_unavailable",
                    headers={"retry-after": "2"},
                ) from None
            if not names:
                raise
            hint = f"choose one of {', '.join(names)}"
            raise ModelNotReadyError(error.problem, hint=hint) from None

    async def inspect_prompt(self, name: str, prompt: str = "", **options: Any) -> dict[str, Any]:
        """Ask a model for the ``ids`` of a prompt, their ``text`` and its ``context_length``."""
        info = await self.info(name)
        unsupported = ApiError(400, f"{name!r} does not report how it tokenizes", param="model")
        if not info.made_by_llmserve:
            raise unsupported
        if info.task == GENERATE:
            # One of an older llmserve answers the prompt instead.
            options["max_tokens"] = 1
        asked = {"prompt_only": True, "timeout": _INSPECT_SECONDS, **options}
        pair, client = info.inputs.get(TEXT_PAIR.name), self._client()
        if pair is not None and not pair.optional:
            # Nothing can be asked of a reranker without a second text.
            computed = await client.compute(name, [prompt], pairs=[""], **asked)
            answers = computed.outputs.get(TEXT_OUTPUT.name)
            text = "" if answers is None else str(answers.reshape(-1)[0])
        else:
            text = (await client.generate(name, prompt, **asked)).text
        try:
            report = json.loads(text)
            required = {key: report[key] for key in ("ids", "text", "context_length")}
            return {**required, **{key: report.get(key) for key in _OPTIONAL}}
        except (ValueError, KeyError, TypeError):
            raise unsupported from None

    async def context_length(self, name: str) -> int | None:
        """Return the limit of prompt and answer tokens together, if the model reports it."""
        length: int | None = (await self._description(name)).get("context_length")
        return length

    async def longest_prompt(self, name: str) -> int | None:
        """Return how many characters a prompt may have at most, if the model reports it."""
        length: int | None = (await self._description(name)).get("longest_prompt")
        return length

    async def images(self, name: str) -> ImageReport:
        """Return what a model says of the images that it reads, as far as it says any."""
        said = (await self._description(name)).get("images")
        if not isinstance(said, dict) or not all(type(each) is int for each in said.values()):
            return ImageReport()
        known = {row.name: said[row.name] for row in fields(ImageLimits) if row.name in said}
        return ImageReport(ImageLimits(**known), said.get("tokens") or IMAGE_TOKENS)

    async def image_bytes(self) -> int:
        """Return how much the images of a request may take, as the models allow that see any."""
        if self._loads is not None:
            # What is not loaded does not say.
            return MAX_IMAGE_BYTES
        with suppress(LLMServeError):
            seeing = [info.name for info in await self.offered() if IMAGE_URL.name in info.inputs]
            reports = [await self.images(name) for name in seeing]
            limits = (each.limits for each in reports)
            most = (each.images * each.longest if each else MAX_IMAGE_BYTES for each in limits)
            return min(MAX_IMAGE_BYTES, max(most, default=0))
        return 0

    async def chat_template(self, name: str) -> str | None:
        """Return the text of a model's chat template, if the model reports it."""
        template = (await self._description(name)).get("chat_template")
        return template if isinstance(template, str) else None

    async def built(self, name: str) -> int:
        """Return when a model was built, in seconds since 1970; 0 if it does not report it."""
        built = (await self._description(name)).get("built")
        return built if isinstance(built, int) else 0

    async def special_tokens(self, name: str) -> dict[str, Any]:
        """Return the texts of a model's special tokens, and the ids ``around`` each text."""
        tokens = (await self._description(name)).get("special_tokens")
        return tokens if isinstance(tokens, dict) else {}

    async def fills_in(self, name: str) -> bool:
        """Return whether a model writes what is between two texts; True if it cannot be asked."""
        said = await self._description(name)
        return self.health(name).description is None or bool(said.get("fill_in"))

    async def labels(self, name: str) -> list[str]:
        """Return the labels of a classifier in the order of its classes, if it reports them."""
        return await self._words(name, "labels")

    async def prompts(self, name: str) -> list[str]:
        """Return the names of a model's own prompts, if it reports them."""
        return await self._words(name, "prompts")

    async def adapters(self, name: str) -> Sequence[str]:
        """Return the names of a model's adapters at the moment, or the last if it does not say."""
        report = await self._report(name) if self._loads is not None else None
        if report is not None and report.demand is not None:
            # To list them is no reason to load it.
            return report.demand.adapters
        model = self.health(name)
        with suppress(LLMServeError, ApiError, asyncio.TimeoutError):
            if ADAPTER.name in (await self.info(name)).inputs:
                said = await asyncio.wait_for(self.inspect_prompt(name), _QUICK_SECONDS)
                model.adapters = tuple(said.get("adapters") or ())
        return model.adapters

    async def _words(self, name: str, field: str) -> list[str]:
        words = (await self._description(name)).get(field)
        return words if isinstance(words, list) else []

    async def _description(self, name: str) -> dict[str, Any]:
        """Return what a model reports about itself; :meth:`watch` keeps it up to date."""
        model = self.health(name)
        if model.description is None:
            if (asked := self._describing.get(name)) is None:
                # Who asks meanwhile waits for the same answer, even if this request is cancelled.
                # It is no part of this request, and so not of its trace.
                asked = Context().run(asyncio.ensure_future, self._describe(name))
                self._describing[name] = asked
                asked.add_done_callback(lambda _: self._describing.pop(name))
            await asyncio.shield(asked)
        return model.description or {}

    async def _describe(self, name: str, process: object = None) -> None:
        # It must not be unloaded meanwhile; one that is not loaded is described when it is.
        loads = self._loads
        held = loads.hold_if_loaded(name) if loads is not None else nullcontext()
        with suppress(LLMServeError, asyncio.TimeoutError):
            async with held:
                try:
                    report = await asyncio.wait_for(self.inspect_prompt(name), _QUICK_SECONDS)
                except (RequestRejectedError, ApiError):
                    report = {}
                self.health(name).description, self.health(name).described = report, process

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
        return self._models.setdefault(name, Health(name))

    def record_answer(self, name: str) -> None:
        model = self.health(name)
        model.answers += 1
        model.answered(time.monotonic())

    def record_failure(self, name: str, error: LLMServeError, waited: float = math.inf) -> None:
        """Note what a failed request, for whose answer ``waited`` seconds went by, says of it."""
        if is_replica_failure(error) and self._client().is_available(name):
            return  # Other replicas serve the model.
        if isinstance(error, ModelNotReadyError):
            return  # It is not offered, and ready as soon as it is loaded again.
        if isinstance(error, RequestTimeoutError) and waited < health.SLOW_UNSEEN:
            return  # Its client was in more of a hurry than others may be.
        found, now = health.finding(error), time.monotonic()
        if found is health.Finding.DIED:
            self.health(name).died(now, str(error))
        elif found is not health.Finding.REFUSED:
            self.health(name).missed(now, str(error))

    async def watch(self, interval: float) -> None:
        """Repeatedly check the models, and refresh the descriptions of those that may be rebuilt.

        Only those are asked for a token that no `serve` asks, or that have failed a request here.
        """
        while True:
            with suppress(LLMServeError):
                await self._check()
            await asyncio.sleep(interval)

    async def _check(self) -> None:
        names = [info.name for info in await self.offered(refresh=True)]
        reports = {report.name: report for report in await self.supervised()}
        models = [self.health(name) for name in names]
        self._asked = [
            m for m in models if m.name not in reports or m.state is not health.State.READY
        ]
        if self._loads is not None:
            # A canary of this process might be answered while its model is unloaded.
            for model in self._asked:
                report = reports.get(model.name)
                if report is not None and report.state.answers:
                    model.answered(time.monotonic())
            self._asked = []
        processes = {name: _process(reports.get(name)) for name in names}
        outdated = [
            self._describe(model.name, processes[model.name])
            for model in models
            if model.description is not None and model.described != processes[model.name]
        ]
        await asyncio.gather(self._monitor.check(), *outdated)

    async def supervised(self) -> Sequence[ModelReport]:
        """Return the model states from who keeps Triton alive, if that is known.

        ``serve`` notices at once that a model's process has died, a canary only when it is sent.
        """
        if self._supervisor is None:
            return ()
        try:
            if isinstance(self._supervisor, Path):
                status = {"do": "status"}
                said = await asyncio.to_thread(ask, self._supervisor, status, _QUICK_SECONDS)
                if said.replicas:
                    self._client().distrust({each.url: _faulty(each) for each in said.replicas})
                return said.models
            return self._supervisor().models
        except ServerError:
            return ()

    async def _report(self, name: str) -> ModelReport | None:
        return next((model for model in await self.supervised() if model.name == name), None)

    async def state(self) -> dict[str, Any]:
        """Return whether any model is ready, and the state of each."""
        try:
            offered = await asyncio.wait_for(self.offered(), 2)
        except (LLMServeError, asyncio.TimeoutError) as error:
            return {"ready": False, "why": str(error) or "no answer in 2 s", "models": {}}
        supervised = await self.supervised()
        # What `serve` knows not to serve at the moment, and whose answers are wrong, and why.
        down = {model.name: why for model in supervised if (why := model.why_not)}
        reading = {model.name for model in supervised if model.reading}
        faults = {model.name: model.fault.in_words() for model in supervised if model.fault}
        models: dict[str, dict[str, Any]] = {}
        for report in await self.loadable():
            # What is to be loaded answers as well, a little later.
            name, demand = report.name, report.demand
            models[name] = {"ready": name not in down, "loaded": bool(demand and demand.loaded)}
            if name in down:
                models[name]["why"] = down[name]
            elif name in reading and demand and demand.pinned:
                models[name] |= {"ready": False, "why": _READING}
        for info in offered:
            if info.name in models:
                continue
            model = self.health(info.name)
            reasons = [down[name] for name in (info.name, *info.parts) if name in down]
            models[info.name] = {"ready": model.alive and not reasons}
            if not models[info.name]["ready"]:
                models[info.name]["why"] = reasons[0] if reasons else model.why
            elif info.name in reading:
                models[info.name] = {"ready": False, "why": _READING}
            elif fault := faults.get(info.name):
                models[info.name]["fault"] = fault
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


def _process(report: ModelReport | None) -> object:
    """Return which process answers, by the report of `serve`; if there is none, always another."""
    return object() if report is None else (report.restarts, report.loads)


def _faulty(replica: ReplicaReport) -> frozenset[str]:
    return frozenset(model.name for model in replica.models if model.fault)


def _is_kept(report: ModelReport | None) -> bool:
    """Return whether `serve` is to have a model in Triton, even if that does not have it now.

    It may not know yet that a Triton that is stopping has unloaded it.
    """
    return report is not None and report.state is not State.UNLOADED
