"""A model's known answers: what it answered to a few prompts of ours when it was first well.

They are in a file beside the manifest, made by the engine that serves the model: so what changes
them later is a change of the engine, the weights, the tokenizer or the template, and rounding
explains little. Whether they were right from the start is what ``llmserve certify --against`` says.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmserve.client import EXPLAINED, Logprob, Parting
from llmserve.contract.names import KNOWN_ANSWERS
from llmserve.contract.report import FaultReport
from llmserve.contract.tasks import GENERATE
from llmserve.errors import LLMServeError
from llmserve.repository.repository import Model

PROMPTS = (
    "Programming in C++ is like",
    "The capital of France is",
    "Once upon a time",
    "In the evening they meet in small restaurants, drink hot tea and talk about",
)
CHAT = "What is the capital of Japan?"
LENGTH = 16
TOP = 5
PATIENCE = 60.0
"""Seconds for one answer."""
TIMES = 4.0
"""How many times the largest change between equal requests is still explained."""
_LIKELIEST = {"temperature": 0.0, "ignore_eos": True}
DATES = "strftime_now"
"""A template that has this writes the day, so that its prompts differ from one to the next."""
_FORMAT = 1


class UnknownAnswersError(LLMServeError):
    """A model has no known answers, and this is why."""


@dataclass(frozen=True)
class KnownAnswer:
    """A prompt, the ids that the model reads in it, and the likeliest answer."""

    prompt: str
    chat: bool = False
    ids: tuple[int, ...] = ()
    """Empty if the model does not say how it reads a prompt."""
    tokens: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class KnownAnswers:
    """The known answers of one build of a model.

    ``explained`` is what rounding explains of a difference of two log-probabilities, ``template``
    a digest of the chat template, "" if there is none.
    """

    fingerprint: str
    explained: float
    template: str
    answers: tuple[KnownAnswer, ...]

    @classmethod
    def read(cls, model: Model) -> KnownAnswers | None:
        """Read those of a model; None if it has none, or those of another build."""
        try:
            content = json.loads((model.folder / KNOWN_ANSWERS).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT or content["fingerprint"] != model.fingerprint:
                return None
            found = cls(
                str(content["fingerprint"]), float(content["explained"]), str(content["template"]),
                tuple(_answer(each) for each in content["answers"]),
            )  # fmt: skip
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return found if found.answers and found.explained > 0 else None

    def write(self, model: Model) -> None:
        """Keep them beside the manifest; raise :class:`OSError` if that is not possible."""
        draft = model.folder / f".{KNOWN_ANSWERS}.{os.getpid()}"
        try:
            draft.write_text(json.dumps({"format": _FORMAT, **asdict(self)}), encoding="utf-8")
            draft.replace(model.folder / KNOWN_ANSWERS)
        finally:
            draft.unlink(missing_ok=True)


def compare(known: KnownAnswer, now: KnownAnswer, explained: float) -> FaultReport | None:
    """Return what of an answer is not as it was by more than rounding explains."""

    def fault(check: str, why: str, off_by: float | None = None) -> FaultReport:
        return FaultReport(check, why, known.prompt, off_by, explained)

    if known.ids and now.ids != known.ids:
        at = _first_other(known.ids, now.ids)
        return fault("prompt", f"it reads other tokens in the prompt, from token {at + 1}")
    parting = Parting.find(known.tokens, now.tokens)
    both = min(len(known.tokens), len(now.tokens)) if parting is None else parting.at
    for at, (then, here) in enumerate(zip(known.tokens[:both], now.tokens[:both], strict=True)):
        change = abs(then.logprob - here.logprob)
        # So that a difference that is no number is none that is allowed.
        if not change <= explained:
            return fault(
                "log-probabilities",
                f"the log-probability of token {at + 1}, {here.token!r}, changed by {change:.3g}; "
                f"rounding explains {explained:.2g}",
                change if math.isfinite(change) else None,
            )
    if parting is not None and parting.verdict(explained) == "differs":
        change = parting.change or 0.0
        was, found = known.tokens[parting.at].token, now.tokens[parting.at].token
        return fault(
            "answer",
            f"token {parting.at + 1} is {found!r} instead of {was!r}, which takes a change of "
            f"{change:.3g}; rounding explains {explained:.2g}",
            change,
        )
    if parting is None and len(now.tokens) != len(known.tokens):
        return fault("length", f"it has {len(now.tokens)} tokens instead of {len(known.tokens)}")
    return None


async def ask(client: Any, model: str, prompt: str, *, chat: bool) -> KnownAnswer:
    """Ask a model for its likeliest answer; raise what prevents that."""
    info = await client.model(model)
    asked: dict[str, Any] = {"prompt": prompt}
    if chat:
        asked = {"messages": [{"role": "user", "content": prompt}]}
    ids: Sequence[int] = ()
    if "prompt_only" in info.inputs:
        ids = (await inspect_prompt(client, model, asked))["ids"]
    options = {"max_tokens": LENGTH, "logprobs": TOP, **_LIKELIEST}
    options = {name: value for name, value in options.items() if info.input_of(name)}
    answer = await client.generate(model, **asked, **options, timeout=PATIENCE)
    return KnownAnswer(prompt, chat, tuple(ids), tuple(answer.logprobs or ()))


async def ask_for_template(client: Any, model: str) -> str:
    """Return a model's chat template; "" if it has none, or does not say it."""
    if "prompt_only" not in (await client.model(model)).inputs:
        return ""
    return str((await inspect_prompt(client, model, {"prompt": ""})).get("chat_template") or "")


async def check(client: Any, model: str, known: KnownAnswers, number: int) -> FaultReport | None:
    """Ask a model one of its known answers again."""
    then = known.answers[number % len(known.answers)]
    if then.chat or number % len(known.answers) == 0:
        template = await ask_for_template(client, model)
        if digest(template) != known.template:
            return FaultReport("template", "its chat template is another one", then.prompt)
    return compare(then, await ask(client, model, then.prompt, chat=then.chat), known.explained)


async def find(client: Any, name: str, model: Model) -> tuple[KnownAnswers, str]:
    """Return a model's known answers, which are made if there are none, and why they are not kept.

    The files of the model must be those that are loaded: a build may just have replaced them.
    """
    info = await client.model(name, refresh=True)
    if not info.fingerprint:
        raise UnknownAnswersError("it has no fingerprint, so build it again")
    if info.fingerprint != model.fingerprint:
        raise UnknownAnswersError("it was built anew, and is not loaded yet")
    if known := await asyncio.to_thread(KnownAnswers.read, model):
        return known, ""
    known, not_kept = await learn(client, name, model), ""
    try:
        await asyncio.to_thread(known.write, model)
    except OSError as error:
        not_kept = str(error)
    return known, not_kept


async def learn(client: Any, name: str, model: Model) -> KnownAnswers:
    """Ask a model twice what it answers, the second time all at once; raise if that differs.

    What differs a little between the two is rounding, of which more may come later.
    """
    info = await client.model(name)
    if info.task != GENERATE or "logprobs" not in info.inputs:
        raise UnknownAnswersError("it tells no log-probabilities of its answers")
    template = await ask_for_template(client, name)
    asked = [(prompt, False) for prompt in PROMPTS]
    if template and DATES not in template:
        asked.append((CHAT, True))
    first = [await ask(client, name, prompt, chat=chat) for prompt, chat in asked]
    again = await asyncio.gather(*(ask(client, name, prompt, chat=chat) for prompt, chat in asked))
    explained = EXPLAINED.get(precision(model), EXPLAINED["bfloat16"])
    pairs = list(zip(first, again, strict=True))
    explained = max(explained, TIMES * max(_change(*pair) for pair in pairs))
    for one, other in pairs:
        if not one.tokens:
            raise UnknownAnswersError(f"it answers nothing to {one.prompt!r}")
        most = EXPLAINED["int4"]
        if fault := compare(one, other, min(explained, most)):
            raise UnknownAnswersError(f"it does not answer twice the same: {fault.why}")
    return KnownAnswers(model.fingerprint, explained, digest(template), tuple(first))


def precision(model: Model) -> str:
    """Return the type in which a model is computed, as far as its manifest says it.

    Of several types that options of its build name, it is the one which explains most.
    """
    manifest = model.manifest
    if manifest is None:
        return ""
    named = [str(each) for each in manifest.options.values()]
    found = [name for name in named if name in EXPLAINED] or [str(manifest.size.get("dtype"))]
    return max(found, key=lambda name: EXPLAINED.get(name, 0.0))


def digest(template: str) -> str:
    return hashlib.sha256(template.encode(errors="replace")).hexdigest() if template else ""


async def inspect_prompt(client: Any, model: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    said = await client.generate(model, **asked, prompt_only=True, timeout=PATIENCE)
    content = json.loads(said.text)
    return {"ids": (), **content} if isinstance(content, dict) else {"ids": ()}


def _change(one: KnownAnswer, other: KnownAnswer) -> float:
    """Return the largest change of the log-probabilities of tokens that both have."""
    parting = Parting.find(one.tokens, other.tokens)
    both = len(one.tokens) if parting is None else parting.at
    pairs = zip(one.tokens[:both], other.tokens[:both], strict=False)
    changes = [abs(ours.logprob - theirs.logprob) for ours, theirs in pairs]
    return max((each for each in changes if math.isfinite(each)), default=0.0)


def _first_other(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _answer(content: Mapping[str, Any]) -> KnownAnswer:
    return KnownAnswer(
        str(content["prompt"]), bool(content["chat"]), tuple(map(int, content["ids"])),
        tuple(read_logprob(each) for each in content["tokens"]),
    )  # fmt: skip


def read_logprob(content: Mapping[str, Any]) -> Logprob:
    read = Logprob(int(content["id"]), str(content["token"]), float(content["logprob"]))
    return replace(read, top=tuple(read_logprob(each) for each in content["top"]))
