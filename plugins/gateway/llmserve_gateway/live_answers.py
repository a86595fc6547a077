"""A share of the answers to users, handed to `serve`, whose models judge them when they are idle.

Such an answer is asked for with log-probabilities, of which its user sees nothing. Nothing of it is
kept here once it is handed over, and nothing is written.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Mapping
from contextvars import Context
from pathlib import Path
from typing import Any

from llmserve.client import ModelInfo
from llmserve.errors import ServerError
from llmserve.runtime.contract import (
    ADAPTER,
    CACHE_SALT,
    FILL_CONTEXT,
    OPTIONS,
    PRIORITY_CLASS,
    PROMPT_ONLY,
)
from llmserve.server import MOST_BYTES, MOST_TOKENS, ask
from llmserve_gateway.catalog import Supervisor
from llmserve_gateway.dialects import AnyRequest
from llmserve_gateway.reply import Reply, RequestRecord
from llmserve_gateway.sample import Sample
from llmserve_gateway.text_requests import ParsedRequest

log = logging.getLogger("llmserve.gateway")

_SECONDS = 5.0
_MESSAGES = "messages"
_SCORES = OPTIONS["logprobs"].name
_NEEDED = frozenset({_SCORES, OPTIONS["prompt_logprobs"].name, PROMPT_ONLY.name})
_GROUPS = frozenset({"answer", "sampling", "biases", "logprobs", "format", "chat"})
_FINE = frozenset(
    {row.name for row in OPTIONS.values() if row.group in _GROUPS}
    | {_MESSAGES, FILL_CONTEXT, CACHE_SALT, PRIORITY_CLASS, "x-request-id", ADAPTER.name}
)
"""What changes nothing of the scores that a model tells, and the adapter, with which it judges.
Constraints and images may change them."""


class LiveAnswers:
    """Draws answers, and hands them over, one at a time."""

    def __init__(self, supervisor: Supervisor, share: float) -> None:
        self._supervisor = supervisor if isinstance(supervisor, Path) else None
        self._share = share if self._supervisor is not None else 0.0
        # Which answers are judged is no secret.
        self._chance = random.Random()  # noqa: S311
        self._telling: asyncio.Task[None] | None = None

    def draw(self, info: ModelInfo, request: AnyRequest, reply: Reply) -> None:
        """Have an answer noted, if it is drawn and its model can judge it.

        Not that of a release, which compares it with another.
        """
        # One that is asked again has been drawn, and asks for scores that its user did not.
        if not self._share or reply.answers is not None or reply.sample is not None:
            return
        if self._chance.random() >= self._share:
            return
        if not isinstance(request, ParsedRequest) or not info.made_by_llmserve:
            return
        is_plain = request.tools is None and not request.echo and request.options.keys() <= _FINE
        is_short = request.answer_count == 1 and request.estimated_tokens <= MOST_TOKENS
        if not is_plain or not is_short or not info.inputs.keys() >= _NEEDED:
            return
        reply.sample = Sample(is_hidden=request.options.get(_SCORES) is None)
        if reply.sample.is_hidden:
            request.options[_SCORES] = 1

    def hand_over(self, sample: Sample, record: RequestRecord) -> None:
        """Give `serve` an answer, unless it is being given another one."""
        is_telling = self._telling is not None and not self._telling.done()
        answer = sample.answer(record.model, time.perf_counter() - record.arrived)
        if answer is None or is_telling or self._supervisor is None:
            return
        content = {"do": "judge", "answer": answer.to_json()}
        if len(json.dumps(content)) > MOST_BYTES:
            return
        # It is no part of the request, and so not of its trace.
        start = asyncio.get_running_loop().create_task
        self._telling = Context().run(start, self._tell(self._supervisor, content))

    async def _tell(self, supervisor: Path, content: Mapping[str, Any]) -> None:
        try:
            await asyncio.to_thread(ask, supervisor, content, _SECONDS)
        except ServerError as error:
            # No text of the answer is in it.
            log.warning("an answer was not handed over to be judged: %s", error.problem)

    async def close(self) -> None:
        if self._telling is not None:
            await asyncio.wait([self._telling], timeout=_SECONDS)
