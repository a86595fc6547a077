"""The path of a request through the gateway: authentication, admission, and the response."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from llmserve.client import ToolFormats
from llmserve.errors import (
    InvalidRequestError,
    LLMServeError,
    ModelNotReadyError,
    NotLoadedError,
    RequestRejectedError,
    UnreachableError,
)
from llmserve.plugin import Address
from llmserve.runtime.contract import (
    ADAPTER,
    CACHE_SALT,
    IMAGE_URL,
    LAST_CLASS,
    PRIORITY_CLASS,
    TASKS,
    ImageRefusedError,
    check_image_sizes,
    task_of,
)
from llmserve.server import health
from llmserve_gateway.addresses import check_collector
from llmserve_gateway.admission import Admission, Claim, Limits
from llmserve_gateway.answering import Answering, cancel_on_disconnect
from llmserve_gateway.bodies import ImageRoom, Receive, read_json
from llmserve_gateway.catalog import Catalog, Supervisor
from llmserve_gateway.connections import note_key
from llmserve_gateway.deaths import Deaths
from llmserve_gateway.dialects import AnyRequest, Dialect, Later, Models, R, Truncate, with_named
from llmserve_gateway.errors import ApiError, bad_request, from_llmserve
from llmserve_gateway.image_fetching import ImageFetcher
from llmserve_gateway.inspector import Inspected, Inspector
from llmserve_gateway.key_usage import KeyUsage
from llmserve_gateway.keys import BatchKey, Key, KeyRing, salt_of
from llmserve_gateway.later_answers import LaterAnswers, answer_when_there_is_room
from llmserve_gateway.live_answers import LiveAnswers
from llmserve_gateway.loads import Loads
from llmserve_gateway.log_warnings import LogWarnings
from llmserve_gateway.metrics import Metrics
from llmserve_gateway.model_names import ModelNames, Named
from llmserve_gateway.outcomes import Outcomes
from llmserve_gateway.prompt_limit import check_fits
from llmserve_gateway.releases.comparison import Heard
from llmserve_gateway.releases.release import Plan, Tolerances
from llmserve_gateway.releases.turns import Releases, Turn
from llmserve_gateway.replicas import Replicas
from llmserve_gateway.reply import (
    Reply,
    RequestRecord,
    Send,
    request_id,
    send_nowhere,
)
from llmserve_gateway.response_stores import open_store
from llmserve_gateway.stored_responses import StoredResponses
from llmserve_gateway.text_requests import HELD_BYTES_PER_TOKEN, ParsedRequest
from llmserve_gateway.turns import IN_BACKGROUND, NOBODY, Party, Standing

if TYPE_CHECKING:
    from llmserve.client import ModelInfo
    from llmserve_gateway.tracing import Trace, Tracer

log = logging.getLogger("llmserve.gateway")

BATCH_KEY = "llmserve.batch_key"
"""Where the scope of a request has the key of its batch."""
_RECONNECTIONS = 3
_MANY_TOKENS = 16_384
"""Of larger prompts the gateway knows whether they can fit before it admits them."""


@dataclass(frozen=True)
class Settings:
    """The settings of a gateway; all ``tritons`` serve the same models."""

    tritons: tuple[Address, ...]
    limits: Limits = field(default_factory=Limits)
    request_timeout: float | None = 600.0
    keys: Path | None = None
    models: tuple[str, ...] = ()
    """The models to offer; all that are loaded if empty."""
    open_metrics: bool = False
    """Whether metrics are served without a key."""
    supervisor: Supervisor = None
    """Who reports the state of the models: the socket of ``serve``, or a function."""
    on_demand: bool = False
    """Whether that ``serve`` loads models when a request needs them."""
    canary_interval: float = health.INTERVAL
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Names of the gateway that a request's ``Host`` may have, besides those of loopback."""
    local: bool = False
    """Whether the gateway listens on loopback only."""
    truncate: Truncate = "ranking"
    """Of which requests texts that are too long are cut, if they say nothing of it."""
    tool_parsers: tuple[str, ...] = ()
    """Tool call parsers: a parser's name for all models, ``MODEL=NAME`` for one."""
    tool_prompt: str = ""
    """The text that explains tools to models whose chat template does not, if not our own."""
    collector: str = ""
    """The URL that spans are sent to, if any."""
    batches: Path | None = None
    """The folder of files and batches; without it, there are none."""
    responses: Path | None = None
    """The folder of responses that are kept; without it and ``database``, none are."""
    database: str = field(default="", repr=False)
    """The address of the database that keeps them instead, perhaps with its password."""
    adapter_folder: Path | None = None
    """The folder from which requests may add adapters; without it, they may not."""

    image_hosts: tuple[str, ...] = ()
    """The hosts whose addresses of images are opened for users; others are never."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of models, and the models."""
    warm_scope: str = ""
    """``key`` if a request may find only what is kept of the prompts of its own key."""
    releases: tuple[Plan, ...] = ()
    """New builds of models, and who is to meet them."""
    tolerances: Tolerances = field(default_factory=Tolerances)
    keep_texts: float | None = None
    """For how many hours the texts of compared answers are kept, if at all."""
    release_file: Path | None = None
    """Where it is kept what is known of releases; without it, that ends with the gateway."""
    inspect: bool = False
    """Whether operators may look at the last requests, with their texts."""
    certify_share: float | None = None
    """The share of answers that are handed to ``supervisor``, to be judged by their models."""

    @property
    def metrics(self) -> dict[str, str]:
        """The gRPC addresses of the Tritons whose metrics the gateway serves, and their URLs."""
        return {triton.grpc: triton.metrics for triton in self.tritons if triton.metrics}

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """The hosts to answer for, None for any: another name may lead to this address as well."""
        is_open = not self.keys and self.local
        return self.allowed_hosts if is_open or self.allowed_hosts else None

    @property
    def origins(self) -> tuple[str, ...] | None:
        """The origins of pages to answer, None for any: a page of another origin has no key."""
        return None if self.keys else self.cors_origins


class Gateway:
    """The state of one gateway, and its handling of requests to models."""

    def __init__(
        self,
        settings: Settings,
        *,
        places: Mapping[str, str] = MappingProxyType({}),
        connect: Callable[[Sequence[Address]], Replicas] = Replicas,
    ) -> None:
        """``places`` say where a model is asked for its task; ``connect`` opens connections."""
        self.settings = settings
        self._places = places
        self._connect = connect
        self.admission = Admission(settings.limits)
        self.metrics = Metrics()
        self.keys = KeyRing(settings.keys) if settings.keys else None
        self.loads: Loads | None = None
        if settings.on_demand and isinstance(settings.supervisor, Path):
            limit, observe = settings.limits.max_queue, self.metrics.observe_load
            # What it does is set later.
            self.loads = Loads(
                settings.supervisor, limit, observe, lambda: self.admission.on_arrival()
            )
        self.catalog = Catalog(
            lambda: self.client, settings.models, settings.supervisor, self.loads
        )
        self.images = ImageFetcher(settings.image_hosts)
        self.names = ModelNames(self.catalog, settings.aliases)
        # Of several replicas, `serve` does not say which one's process has died.
        single = settings.supervisor is not None and len(settings.tritons) == 1
        self._deaths = Deaths(self.catalog.supervised) if single else None
        self._warnings = LogWarnings()
        self.tools = ToolFormats(
            self.catalog.chat_template,
            prompt_of=self._prompt_of,
            parsers=settings.tool_parsers,
            prompt=settings.tool_prompt,
            on_message=self._warnings.warn_of_message,
        )
        self.releases = Releases(
            settings.releases,
            settings.tolerances,
            self.admission,
            keep_texts=(settings.keep_texts or 0) * 3600,
            file=settings.release_file,
        )
        self.inspector = Inspector(self._read_prompt) if settings.inspect else None
        self.live_answers = LiveAnswers(settings.supervisor, settings.certify_share or 0.0)
        self._client: Replicas | None = None
        self.responses: StoredResponses | None = None
        if store := open_store(settings.responses, settings.database):
            self.responses = StoredResponses(store)
        self.outcomes = Outcomes(
            self.catalog,
            self.metrics,
            key_usage=KeyUsage(settings.keys) if settings.keys else None,
            tracer=_make_tracer(settings.collector) if settings.collector else None,
        )
        self.later = LaterAnswers(self.responses, self.outcomes) if self.responses else None
        self._models = Models(
            lambda: self.client, self.catalog, self.tools, settings.truncate, self.responses
        )

    @property
    def client(self) -> Replicas:
        """The connections to the Tritons, opened on the loop that serves."""
        if self._client is None:
            self._client = self._connect(self.settings.tritons)
        return self._client

    async def disconnect(self) -> None:
        """Make the next request reconnect: a lost connection waits before it retries."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def close(self) -> None:
        if self.later is not None:
            await self.later.close()
        if self.inspector is not None:
            self.inspector.close()
        await self.disconnect()
        await self.live_answers.close()
        if self.responses is not None:
            await self.responses.close()
        await self.outcomes.close()

    def authenticate(self, headers: Mapping[str, str], scope: Mapping[str, Any]) -> Key | None:
        """Return the key of a request, or None if the gateway needs no keys."""
        if (batch_key := scope.get(BATCH_KEY)) is not None:
            return cast(BatchKey, batch_key)
        if self.keys is None:
            return None
        x_api_key = f"Bearer {headers.get('x-api-key', '')}"
        key = self.keys.authenticate(headers.get("authorization") or x_api_key)
        note_key(scope)
        return key

    def check_model(self, key: Key | None, model: str) -> None:
        if key and not key.allows(model):
            raise ApiError(403, f"this key may not use {model[:200]!r}", param="model")

    @asynccontextmanager
    async def load(
        self,
        key: Key | None,
        request: AnyRequest,
        timeout: float | None,
        reply: Reply | None = None,
        *,
        counts: bool = False,
    ) -> AsyncIterator[None]:
        """Have the model of a request loaded, and keep it, if it is loaded on demand."""
        if self.loads is None:
            yield
            return
        # Who is over its limits has nothing loaded.
        if not counts:
            self._charge(key, request, take=False)
        await self._check_fits(request)
        if isinstance(key, BatchKey):
            holding = self._load_for_batch(self.loads, key, request.model, reply)
        else:
            comments = request.stream and reply is not None and reply.streams_as.has_comments
            party = self._party_of(key)
            holding = self.loads.hold(
                request.model,
                timeout,
                reply,
                comments=comments,
                party=party,
                priority=_class_of(key, request),
            )
        attending = nullcontext() if isinstance(key, BatchKey) else self.admission.attend()
        held = nullcontext() if counts else self._held(key, request)
        with held, attending:
            async with holding as waited:
                if waited:
                    await self._reach(request.model)
                yield

    @asynccontextmanager
    async def _load_for_batch(
        self, loads: Loads, key: BatchKey, model: str, reply: Reply | None
    ) -> AsyncIterator[bool]:
        """Have a model loaded as long as no others come, whatever time that takes."""
        key.waits_for_model = True
        async with loads.hold(
            model, None, reply, of_batch=True, load=key.may_load, priority=LAST_CLASS
        ) as waited:
            key.waits_for_model = False
            yield waited

    async def _reach(self, model: str) -> None:
        """Read about a model that was just loaded, perhaps by a Triton that was restarted."""
        for _ in range(_RECONNECTIONS):
            try:
                await self.client.model(model, refresh=True)
            except UnreachableError:
                # A lost connection waits before it is tried again.
                await self.disconnect()
            except LLMServeError:
                return  # It is reported when the model is asked.
            else:
                return

    @asynccontextmanager
    async def admit(
        self,
        key: Key | None,
        request: AnyRequest,
        timeout: float | None,
        *,
        is_again: bool = False,
        counts: bool = False,
    ) -> AsyncIterator[Claim | None]:
        """Hold the slots of a request, within the limits of its key and of the gateway.

        One that is asked again is charged already, and one that ``counts`` is held as well. Those
        of batches have no claim.
        """
        await self._check_fits(request)
        if isinstance(key, BatchKey):
            async with self.admission.admit_beside(request.answer_count):
                self._charge(key, request)
                yield None
            return
        if not (is_again or counts):
            self._charge(key, request)
        # What waits for its model to be loaded counts since then.
        is_held = counts or self.loads is not None
        held = nullcontext() if is_held else self._held(key, request)
        with held:
            parties = self._parties(key, request.model)
            async with self.admission.admit(
                request.answer_count,
                timeout,
                parties,
                standing=_standing(key, request),
                tokens=request.estimated_tokens,
            ) as claim:
                yield claim

    def _parties(self, key: Key | None, model: str) -> list[Party]:
        """Return whose shares a request takes of: those of its key and of its model.

        Who is alone may have everything.
        """
        of_key = self._party_of(key)
        is_one_of_several = len(self.catalog.observed) > 1 and self.catalog.is_observed(model)
        of_model = Party("model", model) if is_one_of_several else None
        return [party for party in (of_key, of_model) if party is not None]

    def _party_of(self, key: Key | None) -> Party | None:
        return Party("key", key.name) if key and self.keys and self.keys.several else None

    async def _check_fits(self, request: AnyRequest) -> None:
        is_known = self.catalog.is_observed(request.model)
        if is_known and request.estimated_tokens > _MANY_TOKENS:
            await check_fits(request, self.catalog)

    def _held(
        self, key: Key | None, request: AnyRequest, *others: Party
    ) -> AbstractContextManager[None]:
        """Count what a request holds in memory; there are never many of batches."""
        if isinstance(key, BatchKey):
            return nullcontext()
        parties = [party for party in (self._party_of(key), *others) if party]
        # All names that are no models share the limit of one.
        model = request.model if self.catalog.is_observed(request.model) else ""
        return self.admission.hold(model, request.held_tokens, *parties)

    def image_room(self, key: Key | None) -> ImageRoom:
        """Return what images of a request may take, which count while they are read as later."""

        def hold(size: int) -> AbstractContextManager[None]:
            if isinstance(key, BatchKey):
                return nullcontext()
            parties = [party for party in (self._party_of(key),) if party]
            return self.admission.hold("", size // HELD_BYTES_PER_TOKEN, *parties)

        return ImageRoom(self.catalog.image_bytes, hold)

    async def with_images(self, request: R) -> R:
        """Return a request that knows what its model makes of an image; refuse too many of them."""
        if not isinstance(request, ParsedRequest) or not request.images:
            return request
        if self.loads is None:
            check_images(await self.catalog.info(request.model), request)
        elif not self.catalog.is_observed(request.model):
            return request
        report = await self.catalog.images(request.model)
        try:
            if report.limits is not None:
                check_image_sizes(request.images, report.limits)
        except ImageRefusedError as error:
            raise bad_request(str(error), "messages", "invalid_value") from None
        return cast(R, replace(request, image_tokens=report.tokens))

    def _charge(self, key: Key | None, request: AnyRequest, *, take: bool = True) -> None:
        """Count a request against the limits of its key, but a line of a batch only once."""
        if not key or not self.keys or (isinstance(key, BatchKey) and key.is_charged):
            return
        self.keys.charge(key, request.estimated_tokens, request.answer_count, take=take)
        if isinstance(key, BatchKey):
            key.is_charged = take

    def _charge_answer(self, key: Key | None, tokens: int) -> None:
        """Count the tokens of an answer, but those of a line only once if it is asked again."""
        if not key or not self.keys:
            return
        if isinstance(key, BatchKey):
            tokens = max(0, tokens - key.answer_tokens)
            key.answer_tokens += tokens
        self.keys.charge_answer(key, tokens)

    async def answer(self, scope: Any, receive: Receive, send: Send, dialect: Dialect[R]) -> None:
        """Respond to one request, and record its outcome."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        record = RequestRecord(request_id(headers))
        trace = self.outcomes.trace(headers, dialect.operation)
        reply = Reply(send, record, dialect.error_body, headers, dialect.streams_as)
        answering = self._answer(scope, headers, receive, send, reply, dialect, trace)
        inspector = self.inspector
        if inspector is not None and inspector.is_open:
            reply.inspected = Inspected(scope["path"])
        await self.outcomes.record(reply, trace, answering)
        if inspector is not None and reply.inspected is not None:
            inspector.add(reply.inspected, record.facts())

    async def _answer(
        self,
        scope: Mapping[str, Any],
        headers: Mapping[str, str],
        receive: Receive,
        send: Send,
        reply: Reply,
        dialect: Dialect[R],
        trace: Trace | None,
    ) -> None:
        key, record = self.authenticate(headers, scope), reply.record
        record.key = key.name if key else ""
        room = self.image_room(key) if dialect.shows_images else None
        content = await read_json(receive, headers, room)
        if (noted := reply.inspected) is not None:
            noted.body, noted.bodies = content, dialect.read.bodies
        read = dialect.read(content)
        if noted is not None:
            noted.unknown = read.unknown
        read = await self._named(key, read)
        request = await dialect.settled(self._models, key, read)
        reply.sent = request.sent
        if trace is not None:
            trace.set_request(request)
        self._warnings.warn_of_fields(request.unknown)
        self.check_model(key, Named(request.model, request.adapter).full)
        self.images.check(request.options)
        request = await self.with_images(request)
        # Nothing is loaded for what will be refused.
        _standing(key, request)
        await self.releases.hear_builds(request.model, self._fingerprint)
        address = (scope.get("client") or [""])[0]
        answering = Answering(key, headers, receive, send, reply, dialect)
        if request.unloads:
            await self._unload(answering, request)
            return
        begin = partial(self.releases.begin, request, key, content, address)
        if (later := dialect.later(request, record)) is None:
            await self._take_turn(answering, request, begin())
        else:
            await self._answer_later(answering, request, begin, later)

    def may_change_models(self, key: Key | None) -> bool:
        """Return whether a request may load and unload models; without keys, local ones may."""
        return key.operator if key else self.settings.local

    def check_may_change_models(self, key: Key | None, do: str) -> None:
        if not self.may_change_models(key):
            what = f"this key may not {do} models" if key else f"to {do} a model takes a key"
            raise ApiError(403, f"{what}: llmserve key new NAME --operator makes one that may")

    async def _unload(self, answering: Answering[R], request: R) -> None:
        """Have a model unloaded once nobody uses it."""
        if self.loads is None:
            what = "keep_alive: this server keeps its models loaded: start it with --on-demand"
            raise bad_request(what, "keep_alive")
        self.check_may_change_models(answering.key, "unload")
        with suppress(NotLoadedError):
            await self.loads.keep(request.model, 0)
        reply = answering.reply
        reply.record.outcome = "stop"
        await reply.send_body(answering.dialect.unloaded(request, reply.record))

    async def _fingerprint(self, model: str) -> str:
        return (await self.client.model(model)).fingerprint

    async def _take_turn(self, answering: Answering[R], request: R, turn: Turn | None) -> None:
        """Have the build of a model answer whose turn it is."""

        async def respond(asked: AnyRequest, is_again: bool = False) -> None:
            once = partial(self._respond, answering, cast(R, asked), is_again=is_again)
            if answering.is_later:
                timeout = self.timeout(answering.headers)
                await answer_when_there_is_room(once, answering.reply.record, timeout)
            else:
                await once()

        if turn is None:
            await respond(request)
            return
        await turn.answer(
            answering.reply,
            respond,
            lambda asked: self._ask_aside(answering.key, answering.dialect, cast(R, asked)),
        )

    async def _answer_later(
        self, client: Answering[R], request: R, begin: Callable[[], Turn | None], later: Later
    ) -> None:
        """Have a request answered in the background, once it is seen that it can be."""
        assert self.later is not None  # noqa: S101
        key = client.key
        self.timeout(client.headers)
        if self.loads is None:
            # What no model could answer is refused now.
            self._check(await self.catalog.info(request.model), request)
        await self._check_fits(request)
        self._charge(key, request)
        await self.later.answer(
            client,
            request,
            later,
            # Its turn is when it is answered.
            lambda answering: self._take_turn(answering, request, begin()),
            held=self._held(key, request, IN_BACKGROUND),
            limits=self.keys.headers(key) if key and self.keys else {},
        )

    async def _respond(
        self, answering: Answering[R], request: R, *, is_again: bool = False
    ) -> None:
        """Have a model answer a client."""
        key, dialect = answering.key, answering.dialect
        receive, reply = answering.receive, answering.reply
        record, timeout = reply.record, self.timeout(answering.headers)
        if self.loads:
            # It may fail after a comment has begun the stream.
            reply.error_event = dialect.failure_of(request, record)
        # A client that disconnects frees its slots, even while its answer is being generated. While
        # its model is loaded it has none, which others need.
        async with (
            cancel_on_disconnect(receive, reply),
            self.load(key, request, timeout, reply, counts=answering.is_later),
            self.admit(
                key, request, timeout, is_again=is_again, counts=answering.is_later
            ) as claim,
        ):
            record.admitted = time.perf_counter()
            if key and self.keys and not isinstance(key, BatchKey) and not answering.is_later:
                reply.headers = self.keys.headers(key)
            # Lines of batches wait for each other, which takes nothing of their time.
            if timeout is not None and not isinstance(key, BatchKey):
                timeout = max(0.001, timeout - (record.admitted - record.arrived))
            info = await self.catalog.info(request.model)
            record.model = info.name
            self._check(info, request)
            await self.images.fetch(request.options)
            if info.made_by_llmserve:
                request.options["x-request-id"] = record.id
            _pass_class(info, request, _class_of(key, request))
            self._keep_apart(key, info, request)
            self.live_answers.draw(info, request, reply)
            usage, responding = await dialect.begin(self._models, info, request, reply, timeout)
            with self.metrics.in_flight(record, request.adapter, usage):
                try:
                    if self._deaths is None:
                        await responding
                    else:
                        await self._deaths.unless_it_dies(info, responding)
                finally:
                    if reply.inspected is not None:
                        reply.inspected.cached_tokens = usage.cached_tokens
                    record.input_tokens = usage.input_tokens
                    record.output_tokens = usage.output_tokens
                    self._charge_answer(key, record.output_tokens)
                    # Of one that was cut off before its model told it, the estimate counts.
                    if claim is not None and (used := record.input_tokens + record.output_tokens):
                        claim.used = used
        self.catalog.record_answer(record.model)
        if request.keep is not None and self.loads is not None and self.may_change_models(key):
            with suppress(NotLoadedError, ModelNotReadyError):
                await self.loads.keep(request.model, request.keep)
        if reply.sample is not None:
            self.live_answers.hand_over(reply.sample, record)

    def _check(self, info: ModelInfo, request: AnyRequest) -> None:
        check_task(info, request.tasks, self._places)
        check_images(info, request)
        check_adapter(info, request)

    def _keep_apart(self, key: Key | None, info: ModelInfo, request: AnyRequest) -> None:
        """Have a request find only what is kept of its own key's prompts, if it is to.

        How fast a prompt is read tells whether another has asked the same.
        """
        if key and info.made_by_llmserve and self.settings.warm_scope == "key":
            request.options[CACHE_SALT] = salt_of(key)

    async def _ask_aside(self, key: Key | None, dialect: Dialect[R], request: R) -> Heard:
        """Ask a model for what nobody sees, as batches do: beside all others.

        A model that is not loaded is not loaded for it.
        """
        reply = Reply(send_nowhere, RequestRecord(request_id({})))
        reply.answers = []
        loads, timeout = self.loads, self.settings.request_timeout
        held = nullcontext() if loads is None else loads.hold_if_loaded(request.model)
        began = time.perf_counter()
        try:
            async with held, self.admission.admit_beside(request.answer_count):
                info = await self.catalog.info(request.model)
                check_task(info, request.tasks, self._places)
                check_images(info, request)
                await self.images.fetch(request.options)
                if "logprobs" not in info.inputs:
                    request.options.pop("logprobs", None)
                _pass_class(info, request, LAST_CLASS)
                self._keep_apart(key, info, request)
                _, responding = await dialect.begin(self._models, info, request, reply, timeout)
                await responding
        except (ApiError, LLMServeError) as error:
            said = error if isinstance(error, ApiError) else from_llmserve(error)
            return Heard(error=said.code or str(said.status))
        return Heard(tuple(reply.answers), seconds=time.perf_counter() - began)

    async def _read_prompt(
        self, model: str, prompt: str, options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return how a model reads a prompt, beside all others, if it is loaded."""
        held = nullcontext() if self.loads is None else self.loads.hold_if_loaded(model)
        async with held, self.admission.admit_beside(1):
            return await self.catalog.inspect_prompt(model, prompt, **options)

    async def _named(self, key: Key | None, request: R) -> R:
        """Return a request to the model that its name means, which may be an adapter's own."""
        if self.names.known(request.model) is None:
            # What may name no model takes memory while that is seen.
            with self._held(key, request):
                return with_named(request, await self.names.find(request.model, key))
        return with_named(request, await self.names.find(request.model, key))

    async def _prompt_of(self, model: str, options: Mapping[str, Any]) -> str | None:
        """Return the prompt that a model makes of these options, nothing if it refuses them.

        None if it does not answer now, because it is full or starts again.
        """
        try:
            return str((await self.catalog.inspect_prompt(model, **options))["text"])
        except InvalidRequestError:
            return ""
        except ApiError as error:
            return "" if error.status == 400 else None
        except RequestRejectedError:
            return None

    def timeout(self, headers: Mapping[str, str]) -> float | None:
        header = headers.get("x-request-timeout")
        maximum = self.settings.request_timeout
        if header is None:
            return maximum
        with suppress(ValueError):
            if (seconds := float(header)) > 0:
                return seconds if maximum is None else min(seconds, maximum)
        raise ApiError(400, "x-request-timeout must be above 0 seconds", param="x-request-timeout")


def _standing(key: Key | None, request: AnyRequest) -> Standing:
    """Return the standing of a request; without keys, each chooses its class."""
    if key is None:
        return NOBODY._replace(priority=request.priority or 0)
    return key.standing(request.priority)


def _class_of(key: Key | None, request: AnyRequest) -> int:
    """Return the class of a request within an engine: those of batches are below all others."""
    return LAST_CLASS if isinstance(key, BatchKey) else _standing(key, request).priority


def _pass_class(info: ModelInfo, request: AnyRequest, number: int) -> None:
    """Tell a model in which class a request is, if it can know and that is not the usual one."""
    request.options.pop(PRIORITY_CLASS, None)
    if number and info.made_by_llmserve:
        request.options[PRIORITY_CLASS] = number


def _make_tracer(collector: str) -> Tracer:
    check_collector(collector)
    from llmserve_gateway.tracing import Tracer, make_exporter

    return Tracer(*make_exporter(collector))


def check_adapter(info: ModelInfo, request: AnyRequest) -> None:
    """Refuse the name of an adapter of a model that has none."""
    if request.adapter and ADAPTER.name not in info.inputs:
        named = Named(request.model, request.adapter).full
        what = f"there is no model {named[:200]!r}: {info.name} has no adapters"
        raise ApiError(404, what, param="model", code="model_not_found")


def check_task(info: ModelInfo, tasks: Sequence[str], places: Mapping[str, str]) -> None:
    """Refuse a request to a model that is for something else, and say where it is asked."""
    if info.task in tasks or not info.task:
        return
    where = f", at {places[info.task]}" if info.task in places else ""
    needed = " or ".join(f"one that {TASKS[task].does}" for task in tasks)
    what = f"{info.name!r} {task_of(info.task).does}{where}: this needs {needed}"
    raise bad_request(what, "model", "unsupported_task")


def check_images(info: ModelInfo, request: AnyRequest) -> None:
    """Refuse images that a model cannot be sent: one that can has an input for them."""
    if IMAGE_URL.name in request.options and IMAGE_URL.name not in info.inputs:
        what = f"{info.name!r} reads only text: it has no input {IMAGE_URL.name} for images"
        raise bad_request(what, "messages", "unsupported_parameter")
