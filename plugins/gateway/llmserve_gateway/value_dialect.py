"""APIs for values of texts: what a request leaves to the gateway, and its answer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from llmserve.client import ModelInfo
from llmserve.errors import ContextLengthError
from llmserve.runtime.contract import CLASSIFY, RERANK, TRUNCATE
from llmserve_gateway.dialects import Dialect, Models
from llmserve_gateway.errors import ApiError, bad_request, from_llmserve
from llmserve_gateway.keys import Key
from llmserve_gateway.reply import Reply, RequestRecord
from llmserve_gateway.usage import Usage
from llmserve_gateway.value_requests import ValueRequest
from llmserve_gateway.values import ValueWriter, compute, cut_texts, input_tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class ValueDialect(Dialect[ValueRequest]):
    """The request and response formats of an API for values."""

    new_writer: Callable[[ValueRequest, RequestRecord, Sequence[str]], ValueWriter]

    async def settled(self, models: Models, key: Key | None, request: ValueRequest) -> ValueRequest:
        """Return a request with what it leaves to the gateway: whether texts are cut, its model."""
        wanted = models.truncate
        cut = wanted == "all" or (wanted == "ranking" and RERANK in request.tasks)
        return await super().settled(models, key, request.with_cut(cut))

    def failure_of(
        self, request: ValueRequest, record: RequestRecord
    ) -> Callable[[ApiError], bytes]:
        del request, record
        return ApiError.event

    async def begin(
        self,
        models: Models,
        info: ModelInfo,
        request: ValueRequest,
        reply: Reply,
        timeout: float | None,
    ) -> tuple[Usage, Awaitable[None]]:
        usage = Usage(1, 1)
        return usage, self._compute(models, info, request, reply, timeout, usage)

    async def _compute(
        self,
        models: Models,
        info: ModelInfo,
        request: ValueRequest,
        reply: Reply,
        timeout: float | None,
        usage: Usage,
    ) -> None:
        """Respond to a request for values."""
        if request.at is not None:
            _check_cut(request.at, await models.catalog.context_length(info.name))
        if request.may_cut and TRUNCATE.name in info.inputs:
            request.options[TRUNCATE.name] = True
        try:
            prompts = await models.catalog.prompts(info.name) if request.pairs else ()
            computed = await compute(models.client(), info, request, timeout, prompts)
        except ContextLengthError as error:
            failure = from_llmserve(error, request.sent)
            failure.message += "; truncate: true has it cut"
            raise failure from None
        usage.update(0, input_tokens(computed), 0)
        labels = await models.catalog.labels(info.name) if CLASSIFY in request.tasks else ()
        writer = self.new_writer(request, reply.record, labels)
        if request.cuts:
            limit = await models.catalog.context_length(info.name)
            writer.warnings += cut_texts(request, computed, limit)
        body = await writer.whole(computed)
        reply.record.first_output = time.perf_counter()
        reply.record.outcome = "stop"
        await reply.send_body(body)


def _check_cut(at: tuple[str, int], context: int | None) -> None:
    """Refuse to cut texts at less than a model reads: models cut where they end."""
    name, limit = at
    if context is not None and limit < context:
        what = f"{name}: this model cuts texts at its own limit of {context} tokens, not at {limit}"
        raise bad_request(what, name)
