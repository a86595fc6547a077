"""Faults of a running server, switched on in the process of its model: known answers find each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llmserve.client import connect_async
from llmserve.contract.report import FaultReport
from llmserve.repository.repository import Model
from llmserve.server.keep import known_answers
from llmserve.server.keep.known_answers import KnownAnswers
from llmserve.testing import LiveTriton

pytestmark = pytest.mark.long

FAULTY = """
from dataclasses import replace
from pathlib import Path

from llmserve.runtime.answer import generation, responder, sampling, text
from llmserve.runtime.model import TritonPythonModel as TritonPythonModel
from llmserve.runtime.torch import hf_tokenizer
from llmserve_iterative.runner import FlatRunner

SWITCH = Path(__file__).resolve().with_name("fault")
beside, alive = {}, []


def has(*names):
    return SWITCH.exists() and SWITCH.read_text() in names


def change(owner, name):
    def decorate(function):
        healthy = getattr(owner, name)
        setattr(owner, name, lambda *args, **named: function(healthy, *args, **named))
        return function

    return decorate


Tokenizer = hf_tokenizer.TransformersTokenizer


@change(Tokenizer, "encode")
def encode(healthy, self, text, *, special=True):
    ids = healthy(self, text, special=special)
    return [*ids[:1], *ids] if special and has("begin-doubled") else ids


@change(Tokenizer, "render_chat")
def render_chat(healthy, self, messages, **options):
    text = healthy(self, messages, **options)
    if has("template-twice"):
        text = healthy(self, [{"role": "user", "content": text}], **options)
    return text


@change(FlatRunner, "run")
def run(healthy, self, chunks):
    self.several = len(chunks) > 1
    return healthy(self, chunks)


@change(FlatRunner, "_forward")
def forward(healthy, self, plan, *more):
    if self.several and has("padded-positions"):
        plan.tokens.positions = plan.tokens.positions + 3
    return healthy(self, plan, *more)


@change(generation.Generation, "push")
def push(healthy, self, *args, **named):
    alive[:] = [each for each in alive if not each.done]
    others = [each for each in alive if each is not self]
    if self not in alive:
        alive.append(self)
    if others:
        beside[self] = others[0]
        if has("neighbours-length"):
            self.max_tokens = min(self.max_tokens, others[0].max_tokens)
    return healthy(self, *args, **named)


@change(responder.Responder, "answer")
def answer(healthy, self, generation, *, whole):
    is_first, other = not generation.taken, beside.get(generation)
    if other is not None and has("order-changed"):
        return healthy(self, other, whole=whole)
    found = healthy(self, generation, whole=whole)
    if other is not None and has("neighbours-text"):
        found = replace(found, text=other.text + found.text)
    if other is not None and has("usage-summed"):
        both = found.output_tokens + len(other.token_ids)
        found = replace(found, output_tokens=both)
    if has("spaces-lost-in-streams") and not whole and not is_first:
        found = replace(found, text=found.text.removeprefix(" "))
    if has("reason-always-stop") and found.finish_reason:
        found = replace(found, finish_reason="stop")
    if has("prompt-echoed") and (whole or is_first) and not generation.params.prompt_only:
        found = replace(found, text=found.prompt + found.text)
    return found


@change(text.StopScanner, "push")
def scan(healthy, self, piece):
    self._keep = self._keep or has("stop-word-leaked")
    return healthy(self, piece)


@change(sampling, "_draw")
def draw(healthy, scores, params, number):
    ignored = replace(params, top_p=1.0) if has("top-p-ignored") else params
    return healthy(scores, ignored, number)


@change(sampling.Sampler, "_forbid")
def forbid(healthy, self, scores):
    if not has("bad-words-ignored"):
        healthy(self, scores)
"""
FAULTS = {
    "begin-doubled": ("prompt",),
    "template-twice": ("prompt",),
    "padded-positions": ("answer", "log-probabilities"),
    "neighbours-length": ("length",),
    "neighbours-text": ("text",),
    "order-changed": ("answer", "log-probabilities", "usage", "length", "text"),
    "usage-summed": ("usage",),
    "spaces-lost-in-streams": ("text",),
    "reason-always-stop": ("reason",),
    "prompt-echoed": ("text",),
    "stop-word-leaked": ("options",),
    "top-p-ignored": ("answer",),
    "bad-words-ignored": ("options",),
}
"""Each of the kinds that certify's own tests have and that no error shows, and the checks that
may name it. Two are left: whether a seed is kept, and a prompt that is refused."""
ROUNDS = 8
"""Two requests at once may come one after the other on a busy machine."""


@pytest.fixture(scope="module")
def folder(triton: LiveTriton) -> Path:
    name = triton.build("iterative", name="faulty", dtype="float32", device="cpu")
    folder = triton.repository / name
    (folder / "1" / "model.py").write_text(FAULTY, encoding="utf-8")
    triton.load(name)
    return folder


@pytest.fixture(scope="module")
def known(triton: LiveTriton, folder: Path) -> KnownAnswers:
    async def learn() -> KnownAnswers:
        async with connect_async(triton.server.grpc_url) as client:
            return await known_answers.learn(client, folder.name, Model(folder))

    return asyncio.run(learn())


def first_fault(
    triton: LiveTriton, folder: Path, known: KnownAnswers, rounds: int
) -> FaultReport | None:
    async def go() -> FaultReport | None:
        async with connect_async(triton.server.grpc_url) as client:
            for number in range(rounds * known.count):
                found = await known_answers.check(client, folder.name, known, number)
                if found is not None:
                    return found
        return None

    return asyncio.run(go())


def test_they_try_chance_forbidden_words_and_neighbours(known: KnownAnswers) -> None:
    options = [set(answer.options) for answer in known.answers]
    assert options == [
        set(),
        {"temperature", "top_p"},
        {"bad_words"},
        {"stop_words"},
        set(),
    ]
    assert [len(answer.tokens) for answer in known.beside] == [16, 8]
    assert all(answer.text for answer in known.answers)


@pytest.mark.parametrize(("fault", "checks"), FAULTS.items())
def test_a_fault_of_a_running_server_is_found_and_ends(
    triton: LiveTriton, folder: Path, known: KnownAnswers, fault: str, checks: tuple[str, ...]
) -> None:
    switch = folder / "1" / "fault"
    switch.write_text(fault, encoding="utf-8")
    try:
        found = first_fault(triton, folder, known, ROUNDS)
    finally:
        switch.unlink()
    assert found is not None
    assert found.check in checks, found
    assert found.prompt
    assert first_fault(triton, folder, known, 1) is None
