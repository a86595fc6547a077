"""Judges a user's answer by the scores that the model gives the same tokens as a prompt.

A prompt is computed by another path than an answer: in one pass, in pages of the cache that nothing
else has, beside no other request. So a page that is stuck, a batch that mixes up its rows or a
cache that is broken shows as a difference, and what rounding explains of one is measured on the
model's known answers. Weights that are damaged compute both alike: those are found by the known
answers themselves.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmserve.client import EXPLAINED, Logprob, Parting
from llmserve.contract.classes import LAST_CLASS
from llmserve.contract.live_answer import LiveAnswer
from llmserve.contract.options import CACHE_SALT, PRIORITY_CLASS
from llmserve.contract.report import FaultReport
from llmserve.errors import LLMServeError, RequestRejectedError
from llmserve.repository.repository import Model
from llmserve.server.keep.known_answers import (
    DATES,
    PATIENCE,
    TIMES,
    KnownAnswers,
    ask_for_template,
    inspect_prompt,
    read_logprob,
)

_CLOCK = 2.0
"""Seconds by which the times of a file system may be off."""
_LENGTH = 64
"""How many tokens are asked for at most, of a model whose answer was wrong."""


class UnjudgedError(LLMServeError):
    """A user's answer cannot be judged, and this is why."""


async def measure(client: Any, model: str, known: KnownAnswers) -> float:
    """Return what rounding explains between an answer's scores and those of it as a prompt."""
    changes = [known.explained / TIMES]
    for answer in known.answers:
        if not answer.ids:
            raise UnjudgedError("it does not say how it reads a prompt")
        scored = await _score(client, model, answer.ids, [each.id for each in answer.tokens])
        pairs = zip(answer.tokens, scored, strict=True)
        changes += [abs(then.logprob - now.logprob) for then, now in pairs]
    most = EXPLAINED["int4"]
    # So that a change that is no number is none that is explained.
    if wrong := next((each for each in changes if not each <= most), None):
        raise UnjudgedError(f"its scores of a prompt are others than of an answer, by {wrong:.3g}")
    return TIMES * max(changes)


def with_adapter_files(answer: LiveAnswer, model: Model, now: float) -> LiveAnswer | None:
    """Return an answer that knows which adapter has given it; None if that may be another by now.

    ``now`` is in seconds since 1970. Another adapter of the same name finds other tokens likely,
    which is no fault of the model.
    """
    if not answer.adapter:
        return answer
    files = model.adapter_files(answer.adapter)
    if files is None or files.changed >= now - answer.age - _CLOCK:
        return None
    return replace(answer, adapter_files=files.identity)


def check_adapter(answer: LiveAnswer, model: Model) -> None:
    """Refuse what was judged of an answer whose adapter was replaced since."""
    files = model.adapter_files(answer.adapter) if answer.adapter else None
    if (files.identity if files else "") != answer.adapter_files:
        raise UnjudgedError("its adapter is another by now")


async def judge(
    client: Any, model: str, answer: LiveAnswer, explained: float
) -> FaultReport | None:
    """Have a model score a user's answer; raise :class:`UnjudgedError` if that is not possible."""
    prompt, context = await _prompt(client, model, answer)
    # The last tokens of an answer that fills the context leave no place for the one that is asked.
    count = len(answer.ids) if context is None else min(len(answer.ids), context - 1 - len(prompt))
    if count < 1:
        raise UnjudgedError("it fills the context")
    scored = await _score(client, model, prompt, answer.ids[:count], answer.adapter)
    return compare(answer, scored, explained)


async def judge_again(
    client: Any, model: str, answer: LiveAnswer, explained: float
) -> FaultReport | None:
    """Ask a model that was wrong the same once more, and judge what it answers now."""
    prompt, _ = await _prompt(client, model, answer)
    adapter = _with(answer.adapter)
    said = await client.generate(
        model, input_ids=prompt, max_tokens=min(len(answer.ids), _LENGTH), logprobs=1,
        temperature=0.0, timeout=PATIENCE, **adapter,
    )  # fmt: skip
    tokens = tuple(said.logprobs or ())
    if not tokens:
        raise UnjudgedError("it tells no log-probabilities")
    now = LiveAnswer.of(model, {"input_ids": prompt, **adapter}, tokens, len(prompt))
    return await judge(client, model, now, explained)


def compare(answer: LiveAnswer, scored: Sequence[Logprob], explained: float) -> FaultReport | None:
    """Return what of an answer's scores is not as the model has them now, beyond rounding.

    No word of the answer is in it: it is a user's.
    """

    def fault(check: str, why: str, off_by: float) -> FaultReport:
        off = off_by if math.isfinite(off_by) else None
        return FaultReport(check, why, "", off, explained)

    rows = zip(scored, answer.logprobs, answer.likeliest, strict=False)
    for at, (now, then, was_likeliest) in enumerate(rows, 1):
        change = abs(then - now.logprob)
        # So that a difference that is no number is none that is allowed.
        if not change <= explained:
            return fault(
                "log-probabilities",
                f"the log-probability of token {at} of {len(answer.ids)} is another one by "
                f"{change:.3g} when the model reads it; rounding explains {explained:.2g}",
                change,
            )
        if not was_likeliest or not now.top:
            continue
        # It found no token likelier then, so that it preferred its own by nothing or more.
        likeliest = now.top[0]
        own = replace(now, top=(replace(likeliest, logprob=now.logprob),))
        parting = Parting.find([own], [replace(likeliest, top=(replace(now, top=()),))])
        if parting is not None and parting.verdict(explained) == "differs":
            margin = parting.change or 0.0
            return fault(
                "answer",
                f"token {at} of {len(answer.ids)} was the likeliest, and is not when the model "
                f"reads it, by {margin:.3g}; rounding explains {explained:.2g}",
                margin,
            )
    return None


async def _prompt(client: Any, model: str, answer: LiveAnswer) -> tuple[list[int], int | None]:
    """Return the ids of a prompt, and how long it and its answer may be, if the model says it."""
    asked = dict(answer.asked)
    if "prompt_only" not in (await client.model(model)).inputs:
        raise UnjudgedError("it does not say how it reads a prompt")
    if asked.get("messages") and DATES in await ask_for_template(client, model):
        raise UnjudgedError("its template writes the day, so that its prompts differ")
    try:
        said = await inspect_prompt(client, model, asked)
    except RequestRejectedError as error:
        # Such as one for an adapter that has gone, which says nothing of the model.
        raise UnjudgedError(f"it does not read its prompt any more: {error.problem}") from None
    ids, context = [int(each) for each in said["ids"]], said.get("context_length")
    if len(ids) != answer.input_tokens:
        raise UnjudgedError("it reads its prompt differently by now")
    return ids, context if isinstance(context, int) else None


async def _score(
    client: Any, model: str, prompt: Sequence[int], answer: Sequence[int], adapter: str = ""
) -> tuple[Logprob, ...]:
    """Return how likely a model finds each token of an answer after its prompt.

    The salt is a new one, so that nothing is found of what was computed of the same tokens.
    """
    info = await client.model(model)
    if "prompt_logprobs" not in info.inputs:
        raise UnjudgedError("it tells no log-probabilities of a prompt")
    # Whoever asks meanwhile goes first.
    own: dict[str, Any] = {CACHE_SALT: secrets.token_hex(16), PRIORITY_CLASS: LAST_CLASS}
    if not info.made_by_llmserve:
        own = {}
    ids = [*prompt, *answer]
    try:
        said = await client.generate(
            model, input_ids=ids, prompt_logprobs=1, max_tokens=1, temperature=0.0, **own,
            timeout=PATIENCE, **_with(adapter),
        )  # fmt: skip
    except RequestRejectedError as error:
        raise UnjudgedError(f"it does not read an answer as a prompt: {error.problem}") from None
    try:
        entries = json.loads(said.extra["prompt_logprobs"])[len(prompt) :]
        scored = tuple(_entry(each) for each in entries)
    except (ValueError, TypeError, KeyError, IndexError):
        raise UnjudgedError("it tells no log-probabilities of a prompt") from None
    if [each.id for each in scored] != [*answer]:
        raise UnjudgedError("its log-probabilities of a prompt are not of all its tokens")
    return scored


def _with(adapter: str) -> dict[str, str]:
    return {"adapter": adapter} if adapter else {}


def _entry(content: Mapping[str, Any]) -> Logprob:
    def with_number(entry: Mapping[str, Any]) -> dict[str, Any]:
        # JSON has no word for what is no number.
        value = entry["logprob"]
        return {**entry, "logprob": math.nan if value is None else value, "top": ()}

    return read_logprob(
        {**with_number(content), "top": [*map(with_number, content.get("top", ()))]}
    )
