"""Files of requests that a server with OpenAI's API answers over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import closing
from typing import Any
from urllib.parse import quote

from llmserve.client.batches.answers import BatchAnswers
from llmserve.client.batches.engine import BatchEngine, BatchReply, ConnectionBrokenError
from llmserve.client.batches.jobs import BatchJob, BatchLine
from llmserve.client.batches.requests import BatchRequests
from llmserve.client.http_answer import BrokenAnswerError
from llmserve.client.openai import OpenAIApi
from llmserve.client.openai_transport import OpenAIRequest, OpenAISession
from llmserve.client.threads import in_thread
from llmserve.errors import ClientError, UnreachableError

CHECK_SECONDS = 20.0


class BatchClient:
    """Has a server answer files of requests, ``concurrency`` of them at a time.

    ``timeout`` limits each answer. A server that is full or not reachable is asked again, for as
    long as ``patience`` lasts.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int = 32,
        timeout: float | None = None,
        patience: float = 600.0,
    ) -> None:
        self._api = OpenAIApi(url)
        self._concurrency = concurrency
        self._timeout = timeout
        self._patience = patience

    def check(self) -> None:
        """Raise before anything is sent if the address or the key is wrong."""
        try:
            with closing(self._api.open(self._api.get("/models"), CHECK_SECONDS)) as answer:
                status, content = answer.status, answer.read()
        except OSError as error:
            raise self._api.unreachable(error) from None
        if status == 401:
            raise self._api.refusal(status, content)
        if status == 404:
            raise UnreachableError(
                f"the server at {self._api.url} does not have OpenAI's API",
                hint="give another address with --openai",
            )

    def answer(
        self,
        requests: BatchRequests,
        answers: BatchAnswers,
        on_line: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        """Answer what has no answer yet; ``on_line`` gets each line when it is written.

        What would affect all other requests too raises: a key that is refused, and a server that
        is not reachable for as long as patience lasts.
        """
        asyncio.run(self._answer(requests, answers, on_line))

    async def _answer(
        self,
        requests: BatchRequests,
        answers: BatchAnswers,
        on_line: Callable[[dict[str, Any]], None],
    ) -> None:
        asyncio.get_running_loop().set_exception_handler(_tell_unless_interrupted)
        async with self._api.session() as session:
            server = _HttpServer(self._api, session, self._concurrency, self._timeout)
            job = BatchJob(requests, answers, name=str(answers.path), on_line=on_line)
            await BatchEngine(server, patience=self._patience).answer(job)


def _tell_unless_interrupted(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what no task has taken, but an interrupt: it is raised wherever it comes.

    In a task of a line, that line has it, and the whole program too.
    """
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


class _HttpServer:
    """A server as the engine of batches asks it."""

    def __init__(
        self, api: OpenAIApi, session: OpenAISession, concurrency: int, timeout: float | None
    ) -> None:
        self._api = api
        self._session = session
        self._concurrency = concurrency
        self._timeout = timeout
        self._asking: dict[asyncio.Task[None], BatchJob] = {}
        self._answered: set[str] = set()
        """The models that have answered: if one is missing later, it is loaded again."""

    def room(self) -> int:
        return self._concurrency

    async def ask(self, line: BatchLine) -> BatchReply | None:
        task: Any = asyncio.current_task()
        self._asking[task] = line.job
        try:
            body = await in_thread(line.body)
            request = self._api.post(line.request.endpoint.removeprefix("/v1"), body)
            reply = await self._send(request)
            if reply.status == 200:
                reply = await in_thread(_readable, reply)
                self._answered.add(line.request.model)
            return reply
        finally:
            del self._asking[task]

    async def _send(self, request: OpenAIRequest) -> BatchReply:
        try:
            return await self._exchange(request, self._timeout)
        except TimeoutError:
            raise self._api.late(self._timeout) from None
        except BrokenAnswerError as error:
            unreachable = self._api.unreachable(error)
            raise ConnectionBrokenError(
                unreachable.problem, hint=unreachable.hint, words=str(error)
            ) from None
        except OSError as error:
            raise self._api.unreachable(error) from None

    async def _exchange(self, request: OpenAIRequest, timeout: float | None) -> BatchReply:
        with closing(await self._session.open(request, timeout)) as answer:
            return BatchReply(answer.status, answer.headers, await answer.read())

    async def is_ready(self, model: str) -> bool:
        return await self._readiness(model) != 503

    async def may_come(self, model: str) -> bool:
        return model in self._answered or await self._readiness(model) == 503

    async def has_come(self, model: str) -> bool:
        return await self._readiness(model) == 200

    async def _readiness(self, model: str) -> int:
        """Return what the server says: 503 is that a model is not ready, as llmserve's say."""
        try:
            page = self._api.get(f"/readyz/{quote(model, safe='')}", at_root=True)
            return (await self._exchange(page, CHECK_SECONDS)).status
        except OSError:
            return 0

    async def is_there(self) -> bool:
        try:
            await self._exchange(self._api.get("/models"), CHECK_SECONDS)
        except OSError:
            return False
        return True

    def note_answer(self) -> None: ...

    def leave(self, job: BatchJob) -> None:
        for task, owner in self._asking.items():
            if owner is job:
                task.cancel()


def _readable(reply: BatchReply) -> BatchReply:
    """Return an answer as JSON that a line can have, or refuse it."""
    body = reply.body
    if not isinstance(body, dict):
        raise ClientError("the server's answer is not JSON", code="bad_answer")
    return BatchReply(reply.status, reply.headers, json.dumps(body).encode())
