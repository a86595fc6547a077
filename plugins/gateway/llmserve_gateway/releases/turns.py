"""A request of a user during a release: who answers it, and what is asked beside it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmserve.errors import LLMServeError, RequestCancelledError
from llmserve_gateway.admission import Admission
from llmserve_gateway.errors import ApiError, from_llmserve
from llmserve_gateway.keys import BatchKey, Key
from llmserve_gateway.releases.background import Background
from llmserve_gateway.releases.comparison import Heard, compare, is_greedy
from llmserve_gateway.releases.kept import ReleaseFile
from llmserve_gateway.releases.release import Plan, Release, Tolerances
from llmserve_gateway.releases.split import user_of
from llmserve_gateway.reply import Reply
from llmserve_gateway.text_requests import ParsedRequest

log = logging.getLogger("llmserve.gateway")

Respond = Callable[[ParsedRequest, bool], Awaitable[None]]
"""Answers a user; it is told whether that is the second attempt."""
Ask = Callable[[ParsedRequest], Awaitable[Heard]]
"""Asks a model for what nobody sees."""

LOGPROBS = 5
_LARGEST = 1 << 20
"""A larger request is not kept to be asked again."""
_BUSY = frozenset({429, 499})
_NOT_A_BUILDS = frozenset({"draining", "queue_full"})


class Releases:
    """The releases of a gateway."""

    def __init__(
        self,
        plans: Sequence[Plan],
        tolerances: Tolerances,
        admission: Admission,
        *,
        keep_texts: float = 0.0,
        file: Path | None = None,
    ) -> None:
        self.of = {
            plan.name: Release(plan, tolerances, keep_texts=keep_texts, on_move=self._moved)
            for plan in plans
        }
        self._file = ReleaseFile(file, self.of) if file is not None and plans else None
        self._known: set[str] = set()
        """The models of whose releases it is known which builds they are of."""
        self._admission = admission
        self.background = Background(admission)
        # Which requests are compared is no secret.
        self._chance = random.Random()  # noqa: S311

    def _moved(self, release: Release) -> None:
        log.warning("release of %s: %s", release.plan.name, release.in_words())
        if self._file is not None:
            # A build that was returned is not to meet anybody again, whatever ends this process.
            self._file.write()

    async def hear_builds(self, model: str, fingerprint: Callable[[str], Awaitable[str]]) -> None:
        """Ask what the builds of a release are: what was kept may be of others."""
        release = self.of.get(model)
        if self._file is None or release is None or model in self._known:
            return
        self._file.begin()
        # One that is not loaded now is asked again.
        with suppress(LLMServeError):
            release.is_of((await fingerprint(model), await fingerprint(release.plan.new)))
            self._known.add(model)

    def make_room_too(self) -> None:
        """Make room for users, beside whatever else does."""
        before, admission = self._admission.on_arrival, self._admission

        def make_room() -> None:
            before()
            self.background.make_room()

        if self.of:
            admission.on_arrival = make_room

    async def close(self) -> None:
        await self.background.close()
        if self._file is not None:
            await self._file.close()

    def begin(
        self, request: object, key: Key | None, content: Mapping[str, Any], address: str
    ) -> Turn | None:
        """Return a user's turn in a release; None if the request has nothing to do with one.

        A request that names an adapter has that of the model that it names.
        """
        if not self.of or not isinstance(request, ParsedRequest) or request.adapter:
            return None
        if (release := self.of.get(request.model)) is None:
            return None
        user = user_of(key.name if key else "", _named_user(content), address)
        is_new = release.takes(user)
        if not is_new and not release.is_watched:
            return None
        is_compared = (
            release.is_watched
            and not isinstance(key, BatchKey)
            and (is_new or self._is_drawn(release))
            and request.sent_bytes <= _LARGEST
            and self.background.reserve()
        )
        release.requests["new" if is_new else "old"] += 1
        return Turn(release, request, self.background, is_new=is_new, is_compared=is_compared)

    def _is_drawn(self, release: Release) -> bool:
        return release.plan.kind == "shadow" and self._chance.random() < release.share


class Turn:
    """A request during a release."""

    def __init__(
        self,
        release: Release,
        request: ParsedRequest,
        background: Background,
        *,
        is_new: bool,
        is_compared: bool,
    ) -> None:
        self._release = release
        self._request = request
        self._background = background
        self._is_new = is_new
        self._is_compared = is_compared
        self._is_handed_on = False
        """Whether the place in the background is given back there."""

    def request(self, *, new: bool) -> ParsedRequest:
        """Return the request to one of the builds, which changes its options."""
        request = self._request
        model = self._release.plan.new if new else request.model
        asked = request.called if new else request.asked
        return replace(request, model=model, asked=asked, options=dict(request.options))

    async def answer(self, reply: Reply, respond: Respond, ask: Ask) -> None:
        """Have the user answered; what the new build cannot, the old one does."""
        try:
            await self._answer(reply, respond, ask)
        finally:
            if self._is_compared and not self._is_handed_on:
                self._background.give_back()

    async def _answer(self, reply: Reply, respond: Respond, ask: Ask) -> None:
        reply.answers = [] if self._is_compared else None
        began = time.perf_counter()
        try:
            await respond(self.request(new=self._is_new), False)
        except (ApiError, LLMServeError) as error:
            live = _failure(error)
            if live is None:
                raise
            if not self._is_new or reply.has_begun:
                self._compare(live, ask)
                raise
            await self._answer_instead(live, reply, respond)
            return
        record = reply.record
        seconds = time.perf_counter() - (record.admitted or began)
        self._release.note_rate(seconds, record.output_tokens, new=self._is_new)
        self._compare(Heard(tuple(reply.answers or ()), seconds=seconds), ask)

    async def _answer_instead(self, failed: Heard, reply: Reply, respond: Respond) -> None:
        """Have the old build answer what the new one could not."""
        reply.answers = []
        old = Heard(error="unknown")
        try:
            await respond(self.request(new=False), True)
            self._release.saved += 1
            old = Heard(tuple(reply.answers))
        except (ApiError, LLMServeError) as error:
            if (refused := _failure(error)) is None:
                raise
            old = refused
            raise
        finally:
            if self._is_compared and old.error != "unknown":
                self._note(old, failed)

    def _compare(self, live: Heard, ask: Ask) -> None:
        if not self._is_compared:
            return

        def drop() -> None:
            self._release.dropped += 1

        self._background.start(lambda: self._compare_with_other(live, ask), drop)
        self._is_handed_on = True

    async def _compare_with_other(self, live: Heard, ask: Ask) -> None:
        """Ask the other build the same, and compare."""
        is_new, scored = self._is_new, is_greedy(self._request.options)
        other = await ask(self._asked(new=not is_new, scored=scored))
        is_known = not scored or all(answer.logprobs for answer in live.answers)
        if not is_known and not live.error and not other.error and live.text != other.text:
            # By how much they differ is only known of an answer with its log-probabilities.
            again = await ask(self._asked(new=is_new, scored=True))
            if again.text == live.text:
                live = replace(again, seconds=live.seconds)
        old, new = (other, live) if is_new else (live, other)
        self._note(old, new)

    def _asked(self, *, new: bool, scored: bool) -> ParsedRequest:
        request = self.request(new=new)
        if scored:
            least = request.options.get("logprobs") or 0
            request.options["logprobs"] = max(LOGPROBS, least)
        # What nobody sees is not kept: a response that is, is the user's answer.
        return replace(
            request, stream=False, include_usage=False, continuous_usage=False, state=None
        )

    def _note(self, old: Heard, new: Heard) -> None:
        request, release = self._request, self._release
        options = request.options
        greedy = is_greedy(options)
        found = compare(options, old, new, release.explained, greedy=greedy, tools=request.tools)
        prompt = str(options.get("messages") or request.prompts)
        release.note(found, old, new, prompt)


def _failure(error: ApiError | LLMServeError) -> Heard | None:
    """Return what a build is to be blamed for, None if this says nothing about it."""
    if isinstance(error, RequestCancelledError):
        return None
    said = error if isinstance(error, ApiError) else from_llmserve(error)
    if said.status in _BUSY or said.code in _NOT_A_BUILDS:
        return None
    return Heard(error=said.code or str(said.status))


def _named_user(content: Mapping[str, Any]) -> str:
    """Return whom a request names, as the APIs of OpenAI and of Anthropic have it."""
    for name in ("safety_identifier", "user"):
        if isinstance(named := content.get(name), str) and named:
            return named
    with suppress(AttributeError):
        named = content["metadata"].get("user_id") if "metadata" in content else None
        return named if isinstance(named, str) else ""
    return ""
