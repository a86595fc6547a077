"""The gateway as an ASGI application: its routes, and the endpoints without streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Mount, Route
from starlette.staticfiles import StaticFiles

from llmserve.errors import LLMServeError, ServerError
from llmserve.runtime.contract import IMAGE_URL
from llmserve.server import ModelReport, ask
from llmserve_gateway import anthropic, responses
from llmserve_gateway.batches.folder import Folder
from llmserve_gateway.batches.routes import BatchRoutes
from llmserve_gateway.batches.runner import Runner
from llmserve_gateway.bodies import ClientDisconnected, Receive, read_json
from llmserve_gateway.document import make_document
from llmserve_gateway.errors import ApiError, bad_request, from_llmserve, queue_full
from llmserve_gateway.fields import (
    Fields,
    ParsedRequest,
    read_messages,
    read_template,
    read_tools,
)
from llmserve_gateway.gateway import (
    AnyDialect,
    Dialect,
    Gateway,
    Settings,
    ValueDialect,
    check_images,
    log,
)
from llmserve_gateway.headers import HeaderChecks, is_anthropics
from llmserve_gateway.keys import Key
from llmserve_gateway.openai_answers import ChatWriter, CompletionWriter, json_response
from llmserve_gateway.openai_requests import read_chat, read_completion, read_prompts
from llmserve_gateway.reply import Send, id_headers, request_id
from llmserve_gateway.triton_metrics import CacheUsage, join_pages, scrape_all
from llmserve_gateway.value_requests import (
    read_classify,
    read_cohere_rerank,
    read_embeddings,
    read_rerank,
    read_score,
    read_tei_embed,
)
from llmserve_gateway.values import EmbeddingsWriter, LabelWriter, RankingWriter, ScoreWriter

PAGE = Path(__file__).with_name("page")
_MAX_CHANGES = 4
"""How many orders to load or unload a model run at once."""
_END_SECONDS = 5.0
"""How long what runs beside requests may take to end."""
_METRICS_TYPE = "text/plain; version=0.0.4"

CHAT = Dialect(read_chat, ChatWriter)
COMPLETION = Dialect(read_completion, CompletionWriter, operation="text_completion")
RESPONSE = Dialect(responses.read_response_request, responses.ResponsesWriter)
MESSAGE = Dialect(anthropic.read_messages_request, anthropic.MessagesWriter, anthropic.error_body)
EMBEDDINGS = ValueDialect(read_embeddings, EmbeddingsWriter, "embeddings")
RERANKING = ValueDialect(read_rerank, RankingWriter, "rerank", ApiError.jina_json)
COHERE_RERANKING = ValueDialect(read_cohere_rerank, RankingWriter, "rerank", ApiError.cohere_json)
SCORING = ValueDialect(read_score, ScoreWriter, "score")
CLASSIFYING = ValueDialect(read_classify, LabelWriter, "classify")
# By all names that these have in the APIs of OpenAI, Jina, Cohere, vLLM and Hugging Face.
DIALECTS: Mapping[str, AnyDialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/embeddings": EMBEDDINGS,
    "/embed": ValueDialect(read_tei_embed, EmbeddingsWriter, "embeddings"),
    "/v1/rerank": RERANKING,
    "/v2/rerank": COHERE_RERANKING,
    "/rerank": RERANKING,
    "/v1/score": SCORING,
    "/score": SCORING,
    "/classify": CLASSIFYING,
}

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    # Its files belong together: after an update, none may come from a browser's cache.
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

# Parts of OpenAI's API that clients ask for, and that have no place in this server.
_ABSENT = {
    "/v1/audio": "speech or transcription",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/moderations": "moderation",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/realtime": "realtime sessions",
}

# What Ollama's clients ask for, and where OpenAI's API has it.
_OLLAMA = {
    "chat": "/v1/chat/completions", "generate": "/v1/completions", "embed": "/v1/embeddings",
    "embeddings": "/v1/embeddings", "tags": "/v1/models", "ps": "/v1/models",
    "show": "/v1/models", "version": "/v1/models",
}  # fmt: skip
_BASE = (
    "the base address of OpenAI's clients is this server's with /v1, that of Anthropic's without"
)

Handler = Callable[[Request, "Key | None"], Awaitable[Response]]


class Endpoint:
    """An ASGI application for one path; it streams without going through Starlette."""

    def __init__(self, gateway: Gateway, dialect: AnyDialect) -> None:
        self._gateway = gateway
        self._dialect = dialect

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        await self._gateway.answer(scope, receive, send, self._dialect)


class Page(StaticFiles):
    """The files of the page, which no other page may frame and which load nothing of others."""

    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


class Routes:
    """The endpoints that do not ask a model for an answer."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._catalog = gateway.catalog
        self._cache_usage = CacheUsage([*gateway.settings.metrics.values()])
        # Not the threads that everything else waits for: a load may take minutes.
        self._changes = ThreadPoolExecutor(_MAX_CHANGES, "llmserve-loads")
        self._changing = 0

    async def models(self, request: Request, key: Key | None) -> Response:
        names = await self._offered(key)
        loadable = {report.name: report for report in await self._catalog.loadable()}
        data = await asyncio.gather(*(self._model(name, loadable.get(name)) for name in names))
        if is_anthropics(request.headers):
            return json_response(anthropic.models_page(data, request.query_params))
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request, key: Key | None) -> Response:
        name = request.path_params["name"]
        if name not in await self._offered(key):
            what = f"there is no model {name[:200]!r}" if name else "/v1/models has no / at its end"
            raise ApiError(404, what, param="model", code="model_not_found")
        report = await self._model(name, await self._loadable(name))
        is_theirs = is_anthropics(request.headers)
        return json_response(anthropic.model_info(report) if is_theirs else report)

    async def load(self, request: Request, key: Key | None) -> Response:
        """Load a model now, whatever has failed before, and answer when it is loaded."""
        return await self._change("load", request, key)

    async def unload(self, request: Request, key: Key | None) -> Response:
        """Unload a model once its requests are answered; the next one has it loaded again."""
        return await self._change("unload", request, key)

    async def _change(self, do: str, request: Request, key: Key | None) -> Response:
        settings = self._gateway.settings
        if not (key.operator if key else settings.local):
            what = f"this key may not {do} models" if key else f"to {do} a model takes a key"
            raise ApiError(403, f"{what}: llmserve key new NAME --operator makes one that may")
        name: str = Fields(await _body(request)).text("model")
        self._gateway.check_model(key, name)
        if await self._loadable(name) is None or not isinstance(settings.supervisor, Path):
            what = f"there is no model {name[:200]!r} that is loaded on demand"
            raise ApiError(404, what, param="model", code="model_not_found")
        await self._order(settings.supervisor, do, name)
        return json_response(await self._model(name, await self._loadable(name)))

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
        fields = Fields(await _body(request))
        name = await self._model_name(fields, key)
        messages, prompt = fields.take("messages"), fields.take("prompt")
        options: dict[str, Any] = {}
        if messages is not None and prompt is not None:
            raise bad_request("send prompt or messages, not both", "prompt")
        if messages is not None:
            options["messages"], images = read_messages(messages)
            options |= images
            options["chat_template_kwargs"] = read_template(fields, options["messages"])
            if tools := read_tools(fields, options["messages"]):
                # Not the constraint of a required call, which is no part of the prompt.
                options = replace(tools, choice="auto", named=None).options(options)
            async with self._loaded(request, key, name):
                info = await self._catalog.info(name)
                options = await self._gateway.tools.place(info, options, tools)
        elif not isinstance(prompt, str):
            raise bad_request("prompt must be a string, or send messages", "prompt")
        bare = fields.take("add_special_tokens", type="boolean") is False
        report = await self._inspect(request, key, ParsedRequest(name, options, [prompt or ""]))
        ids = report["ids"]
        if bare and messages is None:
            async with self._loaded(request, key, name):
                ids = _without(ids, (await self._catalog.special_tokens(name)).get("around", []))
        return json_response(
            {"count": len(ids), "max_model_len": report["context_length"], "tokens": ids,
             "token_strs": None}
        )  # fmt: skip

    async def tokenizer_info(self, request: Request, key: Key | None) -> Response:
        """Return what lm-eval and others read of vLLM's: the special tokens and the template."""
        name = await self._model_name(Fields(dict(request.query_params)), key)
        async with self._loaded(request, key, name):
            tokens = await self._catalog.special_tokens(name)
            template = await self._catalog.chat_template(name)
        if not tokens:
            raise ApiError(400, f"{name!r} does not report its special tokens", param="model")
        named = {each: text for each, text in tokens.items() if each != "around"}
        return json_response({**named, "chat_template": template})

    async def detokenize(self, request: Request, key: Key | None) -> Response:
        fields = Fields(await _body(request))
        name = await self._model_name(fields, key)
        ids = fields.take("tokens")
        if ids == []:
            return json_response({"prompt": ""})
        prompts = read_prompts(ids) if isinstance(ids, list) else [""]
        if len(prompts) != 1 or isinstance(prompts[0], str):
            raise bad_request("tokens must be a list of token ids", "tokens")
        report = await self._inspect(request, key, ParsedRequest(name, {}, prompts))
        return json_response({"prompt": report["text"]})

    async def count_tokens(self, request: Request, key: Key | None) -> Response:
        parsed = anthropic.read_messages_request(await _body(request), count_only=True)
        return json_response({"input_tokens": await self._count(request, key, parsed)})

    async def count_input(self, request: Request, key: Key | None) -> Response:
        parsed = responses.read_response_request(await _body(request))
        count = await self._count(request, key, parsed)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def _count(self, request: Request, key: Key | None, parsed: ParsedRequest) -> int:
        """Return how many tokens the prompt of a request has."""
        self._gateway.check_model(key, parsed.model)
        names = ("messages", "chat_template_kwargs", IMAGE_URL.name)
        options = {name: parsed.options[name] for name in names if name in parsed.options}
        async with self._loaded(request, key, parsed.model):
            info = await self._catalog.info(parsed.model)
            options = await self._gateway.tools.place(info, options, parsed.tools)
        report = await self._inspect(request, key, ParsedRequest(parsed.model, options))
        return len(report["ids"])

    async def live(self, request: Request) -> Response:
        del request
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        state: Mapping[str, Any] = await self._catalog.state()
        if self._gateway.admission.draining:
            state = {**state, "ready": False, "why": "shutting down"}
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
        return json_response(
            make_document(models, batches=self._gateway.settings.batches is not None)
        )

    async def metrics(self, request: Request, key: Key | None) -> Response:
        del request
        metrics = self._gateway.metrics
        metrics.waiting.set(self._gateway.admission.waiting)
        running = {replica.url: replica.running for replica in self._gateway.client.all}
        supervised = await self._catalog.supervised()
        metrics.update(self._catalog.observed, supervised, running)
        if loads := self._gateway.loads:
            metrics.update_loads(supervised, loads.waiting)
        metrics.update_caches(await self._catalog.by_model(await self._cache_usage.read()))
        return Response(metrics.text(key.measured_models if key else ()), media_type=_METRICS_TYPE)

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
                response = _failure(error, body)
            except LLMServeError as error:
                response = _failure(from_llmserve(error), body)
            except ClientDisconnected:
                response = Response(status_code=499)
            except Exception:
                log.exception("request for %s", request.url.path)
                response = _failure(ApiError(500, "the gateway failed: see its log"), body)
            response.raw_headers.extend(id_headers(request.headers, request_id(request.headers)))
            return response

        return endpoint

    async def _inspect(
        self, request: Request, key: Key | None, prompt: ParsedRequest
    ) -> dict[str, Any]:
        """Ask a model about a prompt; this costs it as much as reading a prompt to answer it."""
        ((text, options),) = prompt.model_calls()
        timeout = self._gateway.timeout(request.headers)
        async with (
            self._gateway.load(key, prompt, timeout),
            self._gateway.admit(key, prompt, timeout),
        ):
            check_images(await self._catalog.info(prompt.model), prompt)
            return await self._catalog.inspect_prompt(prompt.model, text, **options)

    async def _offered(self, key: Key | None) -> list[str]:
        names = await self._catalog.names()
        return [name for name in names if key is None or not key.models or name in key.models]

    def _loaded(
        self, request: Request, key: Key | None, name: str
    ) -> AbstractAsyncContextManager[None]:
        """Keep a model loaded while it is asked something."""
        timeout = self._gateway.timeout(request.headers)
        return self._gateway.load(key, ParsedRequest(name, {}), timeout)

    async def _loadable(self, name: str) -> ModelReport | None:
        reports = await self._catalog.loadable()
        return next((report for report in reports if report.name == name), None)

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
        return {
            "id": name,
            "object": "model",
            "created": await self._catalog.built(name),
            "owned_by": "llmserve",
            "max_model_len": await self._catalog.context_length(name),
            "task": demand.task if demand else (await self._catalog.info(name)).task,
            **(fields or {}),
        }

    async def _model_name(self, fields: Fields, key: Key | None) -> str:
        offered = await self._offered(key)
        name: str | None = fields.text("model", required=len(offered) != 1)
        if name is None:
            return offered[0]
        self._gateway.check_model(key, name)
        return name


async def _body(request: Request) -> dict[str, Any]:
    return await read_json(request.receive, request.headers)


def _failure(error: ApiError, body: Callable[[ApiError], bytes] = ApiError.json) -> Response:
    return Response(body(error), error.status, error.headers, media_type="application/json")


def _without(ids: Sequence[int], around: Sequence[int]) -> list[int]:
    """Return the ids of a text without those that its tokenizer puts around each text."""
    before = 0
    while before < min(len(ids), len(around)) and ids[before] == around[before]:
        before += 1
    # What is left of them has to be at the end.
    after = len(around) - before
    # A text that is one of them is not put between them again.
    return [*ids[before : len(ids) - after]] or [*ids]


def _absent(path: str) -> str:
    """Return what to say of a part of OpenAI's API that this server does not have; else nothing."""
    for prefix, what in _ABSENT.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return f": this server has text models, and no {what}; GET /openapi.json lists it all"
    return ""


def _meant(path: str, known: Collection[str]) -> str:
    """Return where a client with a wrong base address wanted to go; nothing if that is unclear."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"] and "v1" not in parts:
        there = _OLLAMA.get(parts[1] if parts[1:] else "")
        instead = f": {there} of OpenAI's is here" if there else ""
        return f": Ollama's own API is not here{instead}; {_BASE}"
    if parts == ["v1"]:
        return f": {_BASE}, and GET /v1/models lists the models"
    for at in range(len(parts)):
        # What is under an endpoint is a part of it, unless it is that endpoint again.
        before, rest = "/" + "/".join(parts[:at]), "/".join(parts[at:])
        for place in (f"/v1/{rest}", f"/{rest}"):
            if place in known and place != path and before not in {*known} - {place}:
                return f": {place} is; {_BASE}"
    return ""


def make_app(settings: Settings) -> Starlette:
    """Return the application; it connects to Triton on the first request."""
    gateway = Gateway(settings)
    folder = Folder(settings.batches) if settings.batches else None
    runner = Runner(gateway, folder, lambda *call: app(*call)) if folder else None
    routes = Routes(gateway)
    guarded, keyed = routes.guarded, not settings.open_metrics

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        del app
        tasks = [asyncio.ensure_future(gateway.catalog.watch(settings.canary_interval))]
        if runner is not None:
            tasks.append(asyncio.ensure_future(runner.run()))
        yield
        for task in tasks:
            task.cancel()
        # Not without end: before Python 3.12, `wait_for` may lose a cancellation.
        await asyncio.wait(tasks, timeout=_END_SECONDS)
        if folder is not None:
            folder.close()
        await gateway.close()

    def post(path: str, endpoint: Any) -> Route:
        return Route(path, endpoint, methods=["POST"])

    api_routes = [
        *(post(path, Endpoint(gateway, dialect)) for path, dialect in DIALECTS.items()),
        post("/v1/messages/count_tokens", guarded(routes.count_tokens, anthropic.error_body)),
        post("/v1/responses/input_tokens", guarded(routes.count_input)),
        post("/tokenize", guarded(routes.tokenize)),
        post("/detokenize", guarded(routes.detokenize)),
        Route("/tokenizer_info", guarded(routes.tokenizer_info)),
        post("/models/load", guarded(routes.load)),
        post("/models/unload", guarded(routes.unload)),
        Route("/v1/models", guarded(routes.models)),
        Route("/v1/models/{name:path}", guarded(routes.model)),
        Route("/livez", routes.live),
        Route("/readyz", routes.ready),
        Route("/readyz/{name:path}", routes.ready),
        Route("/health", routes.ready),
        Route("/openapi.json", guarded(routes.document)),
        Route("/metrics", guarded(routes.metrics, keyed=keyed)),
        Route("/metrics/triton", guarded(routes.triton_metrics, keyed=keyed)),
    ]

    batches = BatchRoutes(runner, [route.path for route in api_routes])
    api_routes += [
        Route("/v1/files", guarded(batches.files), methods=["GET", "POST"]),
        Route("/v1/files/{id}", guarded(batches.file), methods=["GET", "DELETE"]),
        Route("/v1/files/{id}/content", guarded(batches.content)),
        Route("/v1/batches", guarded(batches.batches), methods=["GET", "POST"]),
        Route("/v1/batches/{id}", guarded(batches.batch)),
        post("/v1/batches/{id}/cancel", guarded(batches.cancel)),
    ]

    async def missing(request: Request, error: Any) -> Response:
        del error
        path = request.url.path[:200]
        body = anthropic.error_body if "/v1/messages" in path else ApiError.json
        for route in api_routes:
            if route.matches(request.scope)[0] == Match.PARTIAL:
                allowed = ", ".join(sorted(route.methods or ()))
                what = f"{path} accepts {allowed}, not {request.method}"
                return _failure(ApiError(405, what, headers={"allow": allowed}), body)
        hint = _absent(path) or _meant(path, [route.path for route in api_routes])
        what = f"there is no endpoint {request.method} {path}{hint}"
        return _failure(ApiError(404, what, code="not_found"), body)

    origins = settings.cors_origins
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"],
                      allow_headers=["*"])  # fmt: skip
    checks = Middleware(HeaderChecks, hosts=settings.hosts, origins=settings.origins)
    app = Starlette(
        routes=[*api_routes, Mount("/", Page(directory=PAGE, html=True))],
        middleware=[checks, cors] if origins else [checks],
        exception_handlers={404: missing, 405: missing},
        lifespan=lifespan,
    )
    app.state.gateway = gateway
    return app
