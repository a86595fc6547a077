"""What a model answered when it was first well: how that is made, kept and compared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.client import Completion, Logprob, Piece
from llmserve.contract.names import KNOWN_ANSWERS
from llmserve.repository.repository import Model
from llmserve.server.keep import known_answers
from llmserve.server.keep.known_answers import (
    KnownAnswer,
    KnownAnswers,
    UnknownAnswersError,
    compare,
)

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def token(text: str, logprob: float = -0.5, other: float = -2.0) -> Logprob:
    number = len(text)
    top = (Logprob(number, text, logprob), Logprob(99, f"not {text}", other))
    return Logprob(number, text, logprob, top)


class Client:
    """A model with a template, whose answer to a prompt is one of its words."""

    def __init__(self) -> None:
        self.template, self.fingerprint, self.inputs = TEMPLATE, "fp", {"logprobs", "prompt_only"}
        self.asked: list[dict[str, Any]] = []
        self.answer: Callable[[str], list[Logprob]] = lambda prompt: [token(prompt[:5])]
        self.at_once = self.most_at_once = 0

    async def model(self, name: str, *, refresh: bool = False) -> Any:
        return SimpleNamespace(
            name=name, task="generate", inputs=self.inputs, fingerprint=self.fingerprint,
            input_of=lambda name: name in self.inputs or None,
        )  # fmt: skip

    async def generate(self, name: str, prompt: str = "", **options: Any) -> Any:
        self.asked.append({"prompt": prompt, **options})
        text = prompt or str(options.get("messages"))
        if options.get("prompt_only"):
            report = {"ids": [*map(ord, text)], "chat_template": self.template}
            return SimpleNamespace(text=json.dumps(report))
        found = self.answer(text)[: options.get("max_tokens")]
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return Completion("".join(each.token for each in found), "length", len(text), len(found),
                          logprobs=tuple(found))  # fmt: skip

    async def stream(self, name: str, prompt: str = "", **options: Any) -> Any:
        whole = await self.generate(name, prompt, **options)
        for at, each in enumerate(whole.logprobs):
            is_last = at == len(whole.logprobs) - 1
            reason = whole.finish_reason if is_last else None
            yield Piece(each.token, 0, reason, whole.input_tokens, at + 1, logprobs=(each,))


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return served(tmp_path, "fp")


def served(folder: Path, fingerprint: str) -> Model:
    said = f'parameters {{ key: "llmserve.fingerprint" value {{ string_value: "{fingerprint}" }} }}'
    (folder / "config.pbtxt").write_text(said)
    return Model(folder)


def found(client: Client, model: Model) -> KnownAnswers:
    return asyncio.run(known_answers.find(client, "m", model))[0]


def test_they_are_made_once_and_kept_beside_the_manifest(model: Model) -> None:
    client = Client()
    known = found(client, model)
    assert [answer.chat for answer in known.answers] == [False] * 4 + [True]
    assert known.explained == 0.5, "what 16 bits explain, of a model that does not say its type"
    client.asked.clear()
    assert found(client, model) == known
    assert client.asked == []
    assert [path.name for path in model.folder.iterdir() if "known" in path.name] == [KNOWN_ANSWERS]
    assert KNOWN_ANSWERS not in model.files, "no edit, and no part of the fingerprint"


def test_those_of_another_build_are_made_anew(model: Model, tmp_path: Path) -> None:
    client = Client()
    before = found(client, model)
    client.fingerprint = "fp2"
    with pytest.raises(UnknownAnswersError, match="built anew"):
        found(client, model)
    client.answer = lambda prompt: [token(prompt[:4])]
    after = found(client, served(tmp_path, "fp2"))
    assert after.answers != before.answers


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 1}', '{"format": 2}', '{"format": 3}', "\0"]
)
def test_damaged_ones_are_made_anew(model: Model, content: str) -> None:
    known = found(Client(), model)
    (model.folder / KNOWN_ANSWERS).write_text(content)
    assert found(Client(), model) == known


def test_they_are_known_without_a_place_to_keep_them(model: Model) -> None:
    (model.folder / KNOWN_ANSWERS).mkdir()
    known, not_kept = asyncio.run(known_answers.find(Client(), "m", model))
    assert known.answers
    assert not_kept


def test_a_model_that_answers_in_two_ways_has_none(model: Model) -> None:
    client, number = Client(), iter(range(99))
    client.answer = lambda _: [token(f"word {next(number)}")]
    with pytest.raises(UnknownAnswersError, match="twice the same"):
        found(client, model)


def test_what_its_own_answers_differ_by_is_explained(model: Model) -> None:
    client, number = Client(), iter(range(99))
    client.answer = lambda _: [token("a", -0.5 - 0.25 * (next(number) % 2))]
    assert found(client, model).explained == 1.0


def test_a_model_without_scores_or_fingerprint_has_none(model: Model) -> None:
    client = Client()
    client.inputs = {"prompt_only"}
    with pytest.raises(UnknownAnswersError, match="log-probabilities"):
        found(client, model)
    client.fingerprint = ""
    with pytest.raises(UnknownAnswersError, match="build it again"):
        found(client, model)


def test_a_template_that_writes_the_day_is_only_compared_as_a_text(model: Model) -> None:
    client = Client()
    client.template = "{{ strftime_now('%d') }}" + TEMPLATE
    known = found(client, model)
    assert not any(answer.chat for answer in known.answers)
    checked = asyncio.run(known_answers.check(client, "m", known, 0))
    assert checked is None
    client.template = TEMPLATE
    checked = asyncio.run(known_answers.check(client, "m", known, 0))
    assert checked is not None
    assert checked.check == "template"


KNOWN = KnownAnswer("p", False, (1, 2, 3), (token("a"), token("b", -0.5, -0.52), token("c")))


@pytest.mark.parametrize(
    ("now", "check"),
    [
        (KNOWN, None),
        (replace(KNOWN, ids=(1, 2)), "prompt"),
        (replace(KNOWN, tokens=(token("a", -0.55), *KNOWN.tokens[1:])), None),
        (replace(KNOWN, tokens=(token("a", -0.8), *KNOWN.tokens[1:])), "log-probabilities"),
        (replace(KNOWN, tokens=(token("a", float("nan")),)), "log-probabilities"),
        # Its second token is a tie; what follows is another text.
        (replace(KNOWN, tokens=(KNOWN.tokens[0], Logprob(2, "not b", -0.5, (
            Logprob(2, "not b", -0.5), Logprob(1, "b", -0.53))), token("z"))), None),
        (replace(KNOWN, tokens=(token("a"), token("x"), token("z"))), "answer"),
        (replace(KNOWN, tokens=KNOWN.tokens[:2]), "length"),
        (replace(KNOWN, tokens=()), "length"),
    ],
)  # fmt: skip
def test_an_answer_is_compared_by_what_rounding_explains(
    now: KnownAnswer, check: str | None
) -> None:
    fault = compare(KNOWN, now, 0.1)
    assert (fault.check if fault else None) == check
    if fault is not None:
        assert fault.prompt == "p"
        assert fault.explained == 0.1


WHOLE = replace(KNOWN, text="abc", reason="length", input_tokens=3, output_tokens=3)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({}, None),
        ({"text": "ab c"}, "text"),
        ({"reason": "stop"}, "reason"),
        ({"input_tokens": 4}, "usage"),
        ({"output_tokens": 6}, "usage"),
        # After a tie, it is another answer in all of that.
        ({"tokens": (KNOWN.tokens[0], Logprob(2, "not b", -0.5, (
            Logprob(2, "not b", -0.5), Logprob(1, "b", -0.53)))),
          "text": "anot b", "output_tokens": 2}, None),
    ],
)  # fmt: skip
def test_what_is_told_of_the_same_tokens_is_the_same(
    change: dict[str, Any], check: str | None
) -> None:
    fault = compare(WHOLE, replace(WHOLE, **change), 0.1)
    assert (fault.check if fault else None) == check


@pytest.mark.parametrize(
    ("known", "now", "check"),
    [
        ({"options": {"stop_words": ["c"]}}, {"text": "abc"}, "options"),
        ({"options": {"stop_words": ["d"]}}, {}, None),
        ({"forbidden": 5}, {"tokens": (*KNOWN.tokens[:2], Logprob(5, " c", -0.5))}, "options"),
        # In another spelling, the word may come.
        ({"forbidden": 5}, {}, None),
    ],
)
def test_a_forbidden_word_is_a_fault_even_where_it_is_a_tie(
    known: dict[str, Any], now: dict[str, Any], check: str | None
) -> None:
    then = replace(WHOLE, **known)
    fault = compare(then, replace(then, **now), 0.1)
    assert (fault.check if fault else None) == check


def test_options_and_neighbours_are_among_what_is_asked_again(model: Model) -> None:
    client = Client()
    client.inputs |= {"max_tokens", "temperature", "top_p", "bad_words", "stop_words"}
    words = ["once", " upon", " t", " therefore", " lived"]
    client.answer = lambda _: [token(each) for each in words]
    known = found(client, model)
    # This model keeps no promise, so that no forbidden word can be asked for.
    assert [set(each.options) for each in known.answers] == [
        set(), {"temperature", "top_p"}, set(), set(), set()
    ]  # fmt: skip
    assert (len(known.beside), known.count) == (2, 6)
    client.most_at_once = 0
    for number in range(known.count):
        assert asyncio.run(known_answers.check(client, "m", known, number)) is None
        assert client.most_at_once == (2 if number == 5 else 1)
    assert KnownAnswers.read(model) == known


def test_a_model_that_writes_something_else_in_pieces_is_asked_without_them(model: Model) -> None:
    client = Client()
    client.inputs.add("max_tokens")
    whole = client.stream

    async def stream(name: str, prompt: str = "", **options: Any) -> Any:
        async for piece in whole(name, prompt, **options):
            yield replace(piece, text=piece.text.strip() + "|")

    client.stream = stream  # type: ignore[method-assign]
    assert found(client, model).beside == ()


def test_a_model_that_forbids_words_is_asked_for_that(model: Model) -> None:
    client = Client()
    client.inputs |= {"bad_words", "stop_words"}
    words, forbids = ["once", " upon", " t", " therefore", " lived"], True

    async def generate(name: str, prompt: str = "", **options: Any) -> Any:
        banned = [*options.get("bad_words", ()), *options.get("stop_words", ())] if forbids else []
        client.answer = lambda _: [token(each) for each in words if each.strip() not in banned]
        return await Client.generate(client, name, prompt, **options)

    client.generate = generate  # type: ignore[method-assign]
    known = found(client, model)
    assert [dict(each.options) for each in known.answers] == [
        {}, {}, {"bad_words": ["lived"]}, {"stop_words": ["lived"]}, {}
    ]  # fmt: skip
    forbids = False
    checks = [asyncio.run(known_answers.check(client, "m", known, at)) for at in range(5)]
    assert [each and each.check for each in checks] == [None, None, "options", "options", None]
