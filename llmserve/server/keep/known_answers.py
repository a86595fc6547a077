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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from llmserve.client import EXPLAINED, Completion, Logprob, Parting
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
_SAMPLED = {"temperature": 10.0, "top_p": 1e-7}
"""Chance that leaves nothing but the likeliest token. Without ``top_p``, it would hardly come."""
_BESIDE = ((3, LENGTH), (1, LENGTH // 2))
"""Which prompts are asked at once, and for how many tokens: as different as users' are."""
DATES = "strftime_now"
"""A template that has this writes the day, so that its prompts differ from one to the next."""
_FORMAT = 2


class UnknownAnswersError(LLMServeError):
    """A model has no known answers, and this is why."""


@dataclass(frozen=True)
class KnownAnswer:
    """A prompt, the ids that the model reads in it, and the answer that it has to give.

    ``options`` are those of the request that are not the likeliest answer's. The counts are None if
    the model tells none.
    """

    prompt: str
    chat: bool = False
    ids: tuple[int, ...] = ()
    """Empty if the model does not say how it reads a prompt."""
    tokens: tuple[Logprob, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    text: str = ""
    reason: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    forbidden: int | None = None
    """The token that its request has forbidden. In others, the same word may come."""


@dataclass(frozen=True)
class KnownAnswers:
    """The known answers of one build of a model.

    ``explained`` is what rounding explains of a difference of two log-probabilities, ``template``
    a digest of the chat template, "" if there is none. Those in ``beside`` are asked at once.
    """

    fingerprint: str
    explained: float
    template: str
    answers: tuple[KnownAnswer, ...]
    beside: tuple[KnownAnswer, ...] = ()

    @property
    def count(self) -> int:
        """How many questions they are."""
        return len(self.answers) + bool(self.beside)

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
                tuple(_answer(each) for each in content["beside"]),
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
    if known.input_tokens != now.input_tokens:
        counts = f"{now.input_tokens} tokens in the prompt instead of {known.input_tokens}"
        return fault("usage", f"it counts {counts}")
    if any(each.id == known.forbidden for each in now.tokens):
        return fault("options", "a word is in it that its request has forbidden")
    if any(word in now.text for word in known.options.get("stop_words", ())):
        return fault("options", "a word is in it at which it was to stop")
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
    if parting is None:
        return _compare_around(known, now, fault)
    return None


def _compare_around(
    known: KnownAnswer, now: KnownAnswer, fault: Callable[[str, str], FaultReport]
) -> FaultReport | None:
    """Compare what is told of the same tokens."""
    if now.text != known.text:
        return fault("text", "its tokens are the same, and make another text")
    if now.reason != known.reason:
        return fault("reason", f"it ends by {now.reason!r} instead of {known.reason!r}")
    if now.output_tokens != known.output_tokens:
        counts = f"{now.output_tokens} tokens of it instead of {known.output_tokens}"
        return fault("usage", f"it counts {counts}")
    return None


async def ask(
    client: Any,
    model: str,
    prompt: str,
    *,
    chat: bool,
    options: Mapping[str, Any] = MappingProxyType({}),
    in_pieces: bool = False,
) -> KnownAnswer:
    """Ask a model for its likeliest answer; raise what prevents that."""
    info = await client.model(model)
    asked: dict[str, Any] = {"prompt": prompt}
    if chat:
        asked = {"messages": [{"role": "user", "content": prompt}]}
    ids: Sequence[int] = ()
    if "prompt_only" in info.inputs:
        ids = (await inspect_prompt(client, model, asked))["ids"]
    wanted = {"max_tokens": LENGTH, "logprobs": TOP, **_LIKELIEST, **options}
    wanted = {name: value for name, value in wanted.items() if info.input_of(name)}
    if in_pieces:
        stream = client.stream(model, **asked, **wanted, timeout=PATIENCE)
        answer = Completion.of([piece async for piece in stream])
    else:
        answer = await client.generate(model, **asked, **wanted, timeout=PATIENCE)
    return KnownAnswer(
        prompt, chat, tuple(ids), tuple(answer.logprobs or ()), dict(options), answer.text,
        answer.finish_reason or "", answer.input_tokens, answer.output_tokens,
    )  # fmt: skip


async def ask_again(
    client: Any, model: str, known: KnownAnswer, *, in_pieces: bool = False
) -> KnownAnswer:
    """Ask a model for a known answer as it was asked for."""
    return await ask(
        client, model, known.prompt, chat=known.chat, options=known.options, in_pieces=in_pieces
    )


async def ask_for_template(client: Any, model: str) -> str:
    """Return a model's chat template; "" if it has none, or does not say it."""
    if "prompt_only" not in (await client.model(model)).inputs:
        return ""
    return str((await inspect_prompt(client, model, {"prompt": ""})).get("chat_template") or "")


async def check(client: Any, model: str, known: KnownAnswers, number: int) -> FaultReport | None:
    """Ask a model one of its known answers again, or those that are asked at once."""
    if (number := number % known.count) == len(known.answers):
        return await _check_beside(client, model, known)
    then = known.answers[number]
    if then.chat or number == 0:
        template = await ask_for_template(client, model)
        if digest(template) != known.template:
            return FaultReport("template", "its chat template is another one", then.prompt)
    return compare(then, await ask_again(client, model, then), known.explained)


async def _check_beside(client: Any, model: str, known: KnownAnswers) -> FaultReport | None:
    """Ask at once, and for pieces."""
    asked = (ask_again(client, model, each, in_pieces=True) for each in known.beside)
    pairs = zip(known.beside, await asyncio.gather(*asked), strict=True)
    return next(filter(None, (compare(*pair, known.explained) for pair in pairs)), None)


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
    for one in first:
        if not one.tokens:
            raise UnknownAnswersError(f"it answers nothing to {one.prompt!r}")
    beside = [
        await ask(client, name, PROMPTS[at], chat=False, options={"max_tokens": count})
        for at, count in _BESIDE
        if "max_tokens" in info.inputs
    ]
    again = await asyncio.gather(*(ask_again(client, name, each) for each in first))
    at_once = (ask_again(client, name, each, in_pieces=True) for each in beside)
    neighbours = list(zip(beside, await asyncio.gather(*at_once), strict=True))
    pairs = list(zip(first, again, strict=True))
    explained = EXPLAINED.get(precision(model), EXPLAINED["bfloat16"])
    explained = max(explained, TIMES * max(_change(*pair) for pair in [*pairs, *neighbours]))
    most = min(explained, EXPLAINED["int4"])
    for one, other in pairs:
        if fault := compare(one, other, most):
            raise UnknownAnswersError(f"it does not answer twice the same: {fault.why}")
    if any(compare(*pair, most) for pair in neighbours):
        # All at once it answers as alone, as was seen: in pieces, it writes something else.
        beside = []
    answers = await _with_options(client, info, first, explained)
    return KnownAnswers(model.fingerprint, explained, digest(template), answers, tuple(beside))


async def _with_options(
    client: Any, info: Any, plain: Sequence[KnownAnswer], explained: float
) -> tuple[KnownAnswer, ...]:
    """Return known answers of which some have options, as far as the model keeps them.

    What a server does with a wrong option, it may do with a right one: only what an option promises
    whatever the scores can be told from rounding.
    """
    answers = list(plain)

    async def try_with(at: int, **options: Any) -> KnownAnswer | None:
        if not all(info.input_of(option) for option in options):
            return None
        found = await ask(client, info.name, plain[at].prompt, chat=False, options=options)
        return found if found.tokens else None

    sampled = await try_with(1, **_SAMPLED)
    if sampled and compare(replace(plain[1], text=sampled.text), sampled, explained) is None:
        answers[1] = sampled
    # These are other answers than without the option, and have to keep what that promises.
    if (word := _word_in(plain[2])) and (
        found := await try_with(2, bad_words=[word.token.strip()])
    ):
        found = replace(found, forbidden=word.id)
        answers[2] = plain[2] if compare(found, found, explained) else found
    if (word := _word_in(plain[3])) and (
        found := await try_with(3, stop_words=[word.token.strip()])
    ):
        answers[3] = plain[3] if compare(found, found, explained) else found
    return tuple(answers)


def _word_in(answer: KnownAnswer) -> Logprob | None:
    """Return the last new word of an answer that is one token, if there is one."""
    words = [each.token.strip() for each in answer.tokens]
    for at in range(len(words) - 1, 1, -1):
        word = words[at]
        if len(word) > 2 and word.isalpha() and word not in "".join(words[:at]):
            return answer.tokens[at]
    return None


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
        tuple(read_logprob(each) for each in content["tokens"]), dict(content["options"]),
        str(content["text"]), str(content["reason"]), content["input_tokens"],
        content["output_tokens"], content["forbidden"],
    )  # fmt: skip


def read_logprob(content: Mapping[str, Any]) -> Logprob:
    read = Logprob(int(content["id"]), str(content["token"]), float(content["logprob"]))
    return replace(read, top=tuple(read_logprob(each) for each in content["top"]))
