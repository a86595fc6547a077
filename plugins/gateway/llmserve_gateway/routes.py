"""The endpoints that do not ask a model for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.errors import ConfigError, LLMServeError, ServerError
from llmserve.runtime.contract import GENERATE, IMAGE_URL
from llmserve.server import ModelReport, ask
from llmserve_gateway import anthropic, responses
from llmserve_gateway.adapter_changes import AdapterChanges, read_addition, read_removal
from llmserve_gateway.bodies import ClientDisconnected, read_json
from llmserve_gateway.conversations import MESSAGES, Conversation, read_messages
from llmserve_gateway.errors import ApiError, bad_request, from_llmserve, queue_full
from llmserve_gateway.fields import STRING, TOKEN_IDS, Body, Field, Values, is_ids, said, text
from llmserve_gateway.gateway import Gateway, check_images, log
from llmserve_gateway.generation_fields import MODEL, TEMPLATE, TOOLS, read_template, read_tools
from llmserve_gateway.headers import is_anthropics
from llmserve_gateway.key_usage import SHOWN_DAYS, usage_rows
from llmserve_gateway.keys import Key
from llmserve_gateway.model_names import Named
from llmserve_gateway.openai_answers import json_response
from llmserve_gateway.reply import id_headers, request_id
from llmserve_gateway.text_requests import ParsedRequest
from llmserve_gateway.triton_metrics import CacheUsage, join_pages, scrape_all

_MAX_CHANGES = 4
"""How many orders to load or unload a model run at once."""
_METRICS_TYPE = "text/plain; version=0.0.4"

ORDER = Body(MODEL)
_ANY_MODEL = text("model", "The name of a model, if there are several.")
ONE_MODEL = Body(_ANY_MODEL)
_MESSAGES: Field[Conversation | None] = Field(
    "messages", "A conversation.", read_messages, MESSAGES
)
_BARE = said("add_special_tokens", "Whether to count what is put around a text.")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{name} must be a string, or send messages", name)
    return value


_PROMPT: Field[str | None] = Field("prompt", "A text.", _text, STRING)
TOKENIZED = Body(
    _ANY_MODEL, _PROMPT, _MESSAGES, _BARE, *TEMPLATE, *TOOLS,
    one_of=[_PROMPT.name, _MESSAGES.name],
)  # fmt: skip


def _ids(value: Any, name: str) -> list[int]:
    if value != [] and not is_ids(value):
        raise bad_request(f"{name} must be a list of token ids", name)
    return list(value)


_TOKENS: Field[list[int]] = Field(
    "tokens", "The ids of tokens.", _ids, {**TOKEN_IDS, "minItems": 0}, required=True
)
DETOKENIZED = Body(_ANY_MODEL, _TOKENS)

Handler = Callable[[Request, "Key | None"], Awaitable[Response]]


class Routes:
    """The endpoints that do not ask a model for an answer."""

    def __init__(
        self, gateway: Gateway, document: Callable[[Sequence[str]], Mapping[str, Any]]
    ) -> None:
        self._gateway = gateway
        self._document = document
        self._catalog = gateway.catalog
        self._cache_usage = CacheUsage([*gateway.settings.metrics.values()])
        # Not the threads that everything else waits for: a load may take minutes.
        self._changes = ThreadPoolExecutor(_MAX_CHANGES, "llmserve-loads")
        self._changing = 0
        self._adapters = AdapterChanges(gateway.settings)

    async def models(self, request: Request, key: Key | None) -> Response:
        data = await self.listed(key)
        if is_anthropics(request.headers):
            return json_response(anthropic.models_page(data, request.query_params))
        return json_response({"object": "list", "data": data})

    async def listed(self, key: Key | None) -> list[dict[str, Any]]:
        """Return what is said of each model that a key may use, by each of its names."""
        names = await self._offered(key)
        loadable = {report.name: report for report in await self._catalog.loadable()}
        found = await asyncio.gather(
            *(self._models(name, loadable.get(name), key) for name in names)
        )
        data = [model for models in found for model in models]
        data += await self._by_own_names(data, key)
        return data + self._by_aliases(data)

    async def model(self, request: Request, key: Key | None) -> Response:
        report = await self.reported(request.path_params["name"], key)
        is_theirs = is_anthropics(request.headers)
        return json_response(anthropic.model_info(report) if is_theirs else report)

    async def reported(self, name: str, key: Key | None) -> dict[str, Any]:
        """Return what is said of a model, by any of its names."""
        named, models = await self._gateway.names.find(name, key), []
        if named.model in await self._offered(key):
            models = await self._models(named.model, await self._loadable(named.model), key)
        report = next((model for model in models if model["id"] == named.full), None)
        if report is None:
            what = f"there is no model {name[:200]!r}" if name else "/v1/models has no / at its end"
            raise ApiError(404, what, param="model", code="model_not_found")
        return {**report, "id": name}

    async def load(self, request: Request, key: Key | None) -> Response:
        """Load a model now, whatever has failed before, and answer when it is loaded."""
        return await self._change("load", request, key)

    async def unload(self, request: Request, key: Key | None) -> Response:
        """Unload a model once its requests are answered; the next one has it loaded again."""
        return await self._change("unload", request, key)

    async def _change(self, do: str, request: Request, key: Key | None) -> Response:
        settings = self._gateway.settings
        self._gateway.check_may_change_models(key, do)
        name = ORDER.read(await _body(request))[MODEL]
        self._gateway.check_model(key, name)
        if await self._loadable(name) is None or not isinstance(settings.supervisor, Path):
            what = f"there is no model {name[:200]!r} that is loaded on demand"
            raise ApiError(404, what, param="model", code="model_not_found")
        await self._order(settings.supervisor, do, name)
        return json_response(await self._model(name, await self._loadable(name)))

    async def load_adapter(self, request: Request, key: Key | None) -> Response:
        """Add an adapter of the folder for them to a model, as vLLM does."""
        self._check_may_change_adapters(key)
        order = read_addition(await _body(request))
        return _done(await self._adapters.add(order, await self._offered(key), key))

    async def unload_adapter(self, request: Request, key: Key | None) -> Response:
        """Remove an adapter of a model, as vLLM does."""
        self._check_may_change_adapters(key)
        name = read_removal(await _body(request))
        return _done(await self._adapters.remove(name, await self._offered(key), key))

    def _check_may_change_adapters(self, key: Key | None) -> None:
        if not (key.adapters if key else self._gateway.settings.local):
            what = "this key may not change adapters" if key else "to change adapters takes a key"
            raise ApiError(403, f"{what}: llmserve key new NAME --adapters makes one that may")

    async def _order(self, supervisor: Path, do: str, name: str) -> None:
        """Have a model loaded or unloaded, beside a few others."""
        if self._changing >= _MAX_CHANGES:
            raise queue_full(f"{_MAX_CHANGES} models are being loaded or unloaded by order")
        timeout = self._gateway.settings.request_timeout
        work = partial(ask, supervisor, {"do": do, "model": name}, timeout)
        asked = asyncio.get_running_loop().run_in_executor(self._changes, work)
        self._changing += 1
        asked.add_done_callback(self._changed)
        try:
            # The order goes on, and takes its place, when its client has gone.
            await asyncio.shield(asked)
        except ServerError as error:
            raise ApiError(503, str(error), param="model", code="model_not_loaded") from None

    def _changed(self, asked: asyncio.Future[Any]) -> None:
        self._changing -= 1
        if not asked.cancelled():
            asked.exception()

    async def tokenize(self, request: Request, key: Key | None) -> Response:
        """Return the tokens of a text or a conversation, in vLLM's format."""
        values = TOKENIZED.read(await self._shown(request, key))
        name = await self._model_name(values, key)
        conversation, prompt = values[_MESSAGES], values[_PROMPT]
        options: dict[str, Any] = {}
        if conversation is not None and prompt is not None:
            raise bad_request("send prompt or messages, not both", "prompt")
        if conversation is not None:
            messages = conversation.messages
            options = conversation.options | read_template(values, messages)
            if tools := read_tools(values, messages):
                # Not the constraint of a required call, which is no part of the prompt.
                options = replace(tools, choice="auto", named=None).options(options)
            async with self._loaded(request, key, name):
                info = await self._catalog.info(name)
                options = await self._gateway.tools.place(info, options, tools)
        else:
            # It says what it needs.
            prompt = _PROMPT.read(prompt)
        bare = values[_BARE] is False
        report = await self._inspect(request, key, ParsedRequest(name, options, [prompt or ""]))
        ids = report["ids"]
        if bare and conversation is None:
            async with self._loaded(request, key, name):
                ids = _without(ids, (await self._catalog.special_tokens(name)).get("around", []))
        return json_response(
            {"count": len(ids), "max_model_len": report["context_length"], "tokens": ids,
             "token_strs": None}
        )  # fmt: skip

    async def tokenizer_info(self, request: Request, key: Key | None) -> Response:
        """Return what lm-eval and others read of vLLM's: the special tokens and the template."""
        name = await self._model_name(ONE_MODEL.read(dict(request.query_params)), key)
        async with self._loaded(request, key, name):
            tokens = await self._catalog.special_tokens(name)
            template = await self._catalog.chat_template(name)
        if not tokens:
            raise ApiError(400, f"{name!r} does not report its special tokens", param="model")
        named = {each: text for each, text in tokens.items() if each != "around"}
        return json_response({**named, "chat_template": template})

    async def detokenize(self, request: Request, key: Key | None) -> Response:
        values = DETOKENIZED.read(await _body(request))
        name = await self._model_name(values, key)
        if not (ids := values[_TOKENS]):
            return json_response({"prompt": ""})
        report = await self._inspect(request, key, ParsedRequest(name, {}, [ids]))
        return json_response({"prompt": report["text"]})

    async def count_tokens(self, request: Request, key: Key | None) -> Response:
        parsed = anthropic.read_counted_request(await self._shown(request, key))
        return json_response({"input_tokens": await self._count(request, key, parsed)})

    async def count_input(self, request: Request, key: Key | None) -> Response:
        parsed = responses.read_response_request(await self._shown(request, key))
        count = await self._count(request, key, parsed)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def _count(self, request: Request, key: Key | None, parsed: ParsedRequest) -> int:
        """Return how many tokens the prompt of a request has."""
        model = await self._read_by(parsed.model, key)
        names = ("messages", "chat_template_kwargs", IMAGE_URL.name)
        options = {name: parsed.options[name] for name in names if name in parsed.options}
        async with self._loaded(request, key, model):
            info = await self._catalog.info(model)
            options = await self._gateway.tools.place(info, options, parsed.tools)
        report = await self._inspect(request, key, ParsedRequest(model, options))
        return len(report["ids"])

    async def live(self, request: Request, key: Key | None) -> Response:
        del request, key
        return Response(status_code=200)

    async def ready(self, request: Request, key: Key | None) -> Response:
        state: Mapping[str, Any] = await self._catalog.state()
        if self._gateway.admission.draining:
            state = {**state, "ready": False, "why": "shutting down"}
        if "certified" in request.query_params:
            models = {
                name: {**model, "ready": model["ready"] and "fault" not in model}
                for name, model in state["models"].items()
            }
            is_any = any(model["ready"] for model in models.values())
            state = {**state, "ready": state["ready"] and is_any, "models": models}
        if "all" in request.query_params:
            all_ready = all(model["ready"] for model in state["models"].values())
            state = {**state, "ready": state["ready"] and all_ready}
        status = 200 if state["ready"] else 503
        try:
            key = self._gateway.authenticate(request.headers, request.scope)
        except ApiError:
            # Not even which models there are.
            return json_response({"ready": state["ready"]}, status)
        visible = key.models if key and key.models else None
        name = request.path_params.get("name")
        if name and (visible is None or name in visible):
            models = state["models"]
            model = models.get(name, {"ready": False, "why": state.get("why", "it is not loaded")})
            state = {**model, "ready": state["ready"] and model["ready"]}
            # Without any models, the gateway cannot know that this one does not exist.
            status = 200 if state["ready"] else 404 if models and name not in models else 503
        elif visible is not None and "models" in state:
            models = {name: model for name, model in state["models"].items() if name in visible}
            state = {**state, "models": models}
        return json_response(state, status)

    async def document(self, request: Request, key: Key | None) -> Response:
        del request
        try:
            models = await self._offered(key)
        except LLMServeError:
            models = []  # Triton is not reachable, but the API is the same.
        return json_response(self._document(models))

    async def metrics(self, request: Request, key: Key | None) -> Response:
        del request
        metrics = self._gateway.metrics
        metrics.waiting.set(self._gateway.admission.waiting)
        running = {replica.url: replica.running for replica in self._gateway.client.all}
        supervised = await self._catalog.supervised()
        metrics.update(self._catalog.observed, supervised, running)
        metrics.update_releases(self._gateway.releases.of)
        if loads := self._gateway.loads:
            metrics.update_loads(supervised, loads.waiting)
        metrics.update_caches(await self._catalog.by_model(await self._cache_usage.read()))
        models = key.measured_models if key else ()
        # What others use is for who measures all of it.
        sees_all = key is not None and key.all_metrics
        keys = None if sees_all else [key.name] if key else []
        return Response(metrics.text(models, keys), media_type=_METRICS_TYPE)

    async def usage(self, request: Request, key: Key | None) -> Response:
        """Return what a key has used by day; all of them to one that measures all."""
        del request
        rows: list[dict[str, Any]] = []
        if (key_usage := self._gateway.outcomes.key_usage) is not None and key is not None:
            try:
                days = await key_usage.read()
            except ConfigError as error:
                log.warning("%s", error)
                raise ApiError(500, "what keys have used cannot be read: see its log") from None
            rows = usage_rows(days, SHOWN_DAYS, None if key.all_metrics else key.name)
        return json_response({"usage": rows})

    async def inspect(self, request: Request, key: Key | None) -> Response:
        """Return the last requests to who may see what others have asked."""
        del request
        if (inspector := self._gateway.inspector) is None:
            what = "this gateway shows no requests: start it with --inspect"
            raise ApiError(404, what, code="not_found")
        if not self._gateway.may_change_models(key):
            what = "this key may not see" if key else "it takes a key to see"
            hint = "llmserve key new NAME --operator makes one that may"
            raise ApiError(403, f"{what} what others have asked: {hint}")
        found = [each for each in inspector.look() if not key or key.allows(each["model"])]
        return json_response({"requests": found})

    async def triton_metrics(self, request: Request, key: Key | None) -> Response:
        del request
        if key and key.measured_models:
            raise ApiError(403, "Triton's metrics are of all models, and this key is for some")
        urls = self._gateway.settings.metrics
        if not urls:
            raise ApiError(404, "Triton's metrics have no address: start with --triton-metrics")
        results = await scrape_all([*urls.values()])
        by_replica = zip(urls, results, strict=True)
        pages = {replica: page for replica, page in by_replica if isinstance(page, str)}
        if not pages:
            raise ApiError(503, f"Triton's metrics cannot be read: {results[0]}")
        page = join_pages(pages) if results[1:] else next(iter(pages.values()))
        return Response(page, media_type=_METRICS_TYPE)

    def guarded(
        self, handler: Handler, error_body: Any = ApiError.json, *, keyed: bool = True
    ) -> Any:
        """Return an endpoint that requires a key, and reports errors in the API's format."""

        async def endpoint(request: Request) -> Response:
            body = anthropic.error_body if is_anthropics(request.headers) else error_body
            try:
                key = self._gateway.authenticate(request.headers, request.scope) if keyed else None
                response = await handler(request, key)
            except ApiError as error:
                response = failure(error, body)
            except LLMServeError as error:
                response = failure(from_llmserve(error), body)
            except ClientDisconnected:
                response = Response(status_code=499)
            except Exception:
                log.exception("request for %s", request.url.path)
                response = failure(ApiError(500, "the gateway failed: see its log"), body)
            response.raw_headers.extend(id_headers(request.headers, request_id(request.headers)))
            return response

        return endpoint

    async def _shown(self, request: Request, key: Key | None) -> dict[str, Any]:
        """Read a body that may have images."""
        return await read_json(request.receive, request.headers, self._gateway.image_room(key))

    async def _inspect(
        self, request: Request, key: Key | None, prompt: ParsedRequest
    ) -> dict[str, Any]:
        """Ask a model about a prompt; this costs it as much as reading a prompt to answer it."""
        prompt = await self._gateway.with_images(prompt)
        ((text, options),) = prompt.model_calls()
        timeout = self._gateway.timeout(request.headers)
        async with (
            self._gateway.load(key, prompt, timeout),
            self._gateway.admit(key, prompt, timeout),
        ):
            check_images(await self._catalog.info(prompt.model), prompt)
            await self._gateway.images.fetch(options)
            return await self._catalog.inspect_prompt(prompt.model, text, **options)

    async def _offered(self, key: Key | None) -> list[str]:
        names = await self._catalog.names()
        return [name for name in names if key is None or key.allows_some(name)]

    def _loaded(
        self, request: Request, key: Key | None, name: str
    ) -> AbstractAsyncContextManager[None]:
        """Keep a model loaded while it is asked something."""
        timeout = self._gateway.timeout(request.headers)
        return self._gateway.load(key, ParsedRequest(name, {}), timeout)

    async def _loadable(self, name: str) -> ModelReport | None:
        reports = await self._catalog.loadable()
        return next((report for report in reports if report.name == name), None)

    async def _models(
        self, name: str, loadable: ModelReport | None, key: Key | None
    ) -> list[dict[str, Any]]:
        """Return a model and, as models of their own, its adapters: those that a key may use."""
        model, adapters = await self._model(name, loadable), await self._catalog.adapters(name)
        named = [{**model, "id": Named(name, each).full, "parent": name} for each in adapters]
        return [each for each in (model, *named) if key is None or key.allows(each["id"])]

    async def _by_own_names(
        self, models: Sequence[Mapping[str, Any]], key: Key | None
    ) -> list[dict[str, Any]]:
        """Return the adapters of a list once more, those that a request may name without a model.

        Clients that know their models by such names look for them in the list.
        """
        found = []
        for model in models:
            if parent := model.get("parent"):
                named = Named(parent, model["id"].removeprefix(f"{parent}:"))
                if await self._gateway.names.has_own_name(named, key):
                    found.append({**model, "id": named.adapter})
        return found

    def _by_aliases(self, models: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the models of a list once more that have another name, by it."""
        listed = {model["id"]: model for model in models}
        aliases = self._gateway.names.aliases.items()
        return [
            {**listed[model], "id": name, "root": model}
            for name, model in aliases
            if model in listed and name not in listed
        ]

    async def _model(self, name: str, loadable: ModelReport | None) -> dict[str, Any]:
        demand = loadable and loadable.demand
        fields = (
            loadable
            and demand
            and {
                "loaded": demand.loaded,
                "size": demand.size,
                "state": loadable.state.value,
                "pinned": demand.pinned,
                "why": loadable.why,
            }
        )
        if demand:
            said: dict[str, Any] = {"task": demand.task}
        else:
            info = await self._catalog.info(name)
            said = {"task": info.task, "fingerprint": info.fingerprint}
            if info.task in (GENERATE, ""):
                said["images"] = IMAGE_URL.name in info.inputs
        return {
            "id": name,
            "object": "model",
            "created": await self._catalog.built(name),
            "owned_by": "llmserve",
            "max_model_len": await self._catalog.context_length(name),
            **said,
            **(fields or {}),
        }

    async def _model_name(self, values: Values, key: Key | None) -> str:
        name, offered = values[_ANY_MODEL], await self._offered(key)
        if name is None and len(offered) == 1:
            return offered[0]
        # Which of several is not said.
        return await self._read_by(MODEL.read(name), key)

    async def _read_by(self, name: str, key: Key | None) -> str:
        """Return the model that reads texts for a name: its own, or one of its adapters."""
        named = await self._gateway.names.find(name, key)
        self._gateway.check_model(key, named.full)
        if named.adapter and named.adapter not in await self._catalog.adapters(named.model):
            what = f"there is no model {name[:200]!r}"
            raise ApiError(404, what, param="model", code="model_not_found")
        return named.model


async def _body(request: Request) -> dict[str, Any]:
    return await read_json(request.receive, request.headers)


def failure(error: ApiError, body: Callable[[ApiError], bytes] = ApiError.json) -> Response:
    return Response(body(error), error.status, error.headers, media_type="application/json")


def _done(what: str) -> Response:
    return Response(what, media_type="text/plain")


def _without(ids: Sequence[int], around: Sequence[int]) -> list[int]:
    """Return the ids of a text without those that its tokenizer puts around each text."""
    before = 0
    while before < min(len(ids), len(around)) and ids[before] == around[before]:
        before += 1
    # What is left of them has to be at the end.
    after = len(around) - before
    # A text that is one of them is not put between them again.
    return [*ids[before : len(ids) - after]] or [*ids]
