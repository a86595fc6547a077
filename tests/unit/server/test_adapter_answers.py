"""Answers to users, of adapters too, judged for a day by engines whose scores are noisy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from llmserve.client import Logprob
from llmserve.contract.live_answer import LiveAnswer
from llmserve.repository.repository import Model
from llmserve.server.keep import actions, live_answers
from llmserve.server.keep.certificate import Certificate
from llmserve.server.keep.known_answers import compare
from llmserve.server.keep.picture import Checked
from tests.unit.server.noisy_engine import NOISE, Engine, EngineClient, known_of
from tests.unit.server.simulated import World

_LOOP = asyncio.new_event_loop()
ADAPTERS = {"one": 11, "two": 12}
HOURS = 24


class Served:
    """A model with adapters in a simulated `serve --certify --certify-share`, and its files."""

    def __init__(self, precision: str, folder: Path) -> None:
        self.engine = Engine(NOISE[precision], adapters=dict(ADAPTERS))
        self.known = known_of(self.engine, precision)
        self.client = EngineClient(self.engine)
        measured = live_answers.measure(self.client, "m", self.known)
        self.explained = _LOOP.run_until_complete(measured)
        self.model = Model(folder / "m")
        self.chance = random.Random(1)
        self.judged_of: dict[str, int] = {}
        self.unjudged: list[str] = []
        self.world = World("m")
        self.world.check = self._check
        for memory in self.world.memory.tritons:
            memory.certifies = True
        self.replaced_at = {name: self.world.now - 60 for name in ADAPTERS}
        for name in ADAPTERS:
            self._write(name)

    def _write(self, name: str) -> None:
        files = self.model.folder / "1" / "adapters" / name
        files.mkdir(parents=True, exist_ok=True)
        text = str(self.engine.adapters[name])
        (files / "adapter_model.safetensors").write_text(text, encoding="utf-8")

    def replace_adapter(self, name: str) -> None:
        """Give an adapter other weights, and other files, while it is served."""
        self.engine.adapters[name] += 10 ** len(self.replaced_at)
        self.replaced_at[name] = self.world.now
        self._write(name)

    def ask(self, adapter: str = "", temperature: float = 0.0) -> None:
        """Answer a user, and have that judged."""
        answer = self.engine.live(f"Tell {self.chance.randrange(30)}", adapter, temperature)
        self.offer(answer)

    def offer(self, answer: LiveAnswer) -> None:
        files = self.model.adapter_files(answer.adapter)
        clock = 0.0
        if files is not None:
            # The clock of the files is the machine's, and the world has another.
            clock = files.changed + self.world.now - self.replaced_at[answer.adapter]
        known = live_answers.with_adapter_files(answer, self.model, clock)
        if known is not None:
            self._certificate.offer(known, self.world.now)

    @property
    def _certificate(self) -> Certificate:
        return self.world.memory.tritons[0].models["m"].certificate

    def _check(self, asked: actions.CheckAnswer) -> Checked:
        count, fault, unjudged = len(self.known.answers), None, ""
        if asked.live is None:
            then = self.known.answers[asked.number]
            fault = compare(then, self.engine.answer(then.prompt), self.known.explained)
            return Checked("m", 0, 0.05, count, fault)
        judge = live_answers.judge_again if asked.anew else live_answers.judge
        try:
            coroutine = judge(self.client, "m", asked.live, self.explained)
            fault = _LOOP.run_until_complete(coroutine)
            live_answers.check_adapter(asked.live, self.model)
        except live_answers.UnjudgedError as error:
            fault, unjudged = None, str(error)
            self.unjudged.append(unjudged)
        else:
            name = asked.live.adapter
            self.judged_of[name] = self.judged_of.get(name, 0) + 1
        return Checked("m", 0, 0.05, count, fault, unjudged=unjudged)


@pytest.mark.parametrize("precision", NOISE)
def test_rounding_is_no_alarm_in_a_day_with_adapters(precision: str, tmp_path: Path) -> None:
    """24 hours of a fake clock: greedy and sampled answers, and adapters that are replaced."""
    served = Served(precision, tmp_path)
    world, names, step = served.world, ("", *ADAPTERS), 0
    began = world.now
    while world.now < began + HOURS * 3600:
        step += 1
        if step % 3 == 0:
            served.ask(names[step // 3 % 3], temperature=0.8 * (step % 2))
        if step % 600 == 0:
            # With two answers that are still waiting to be judged.
            served.ask("two")
            served.replace_adapter("two")
        world.step(10.0)
    assert all(served.judged_of[name] > 700 for name in names), served.judged_of
    assert {why.split(":")[0] for why in served.unjudged} == {"its adapter is another by now"}
    assert served._certificate.faults == 0
    assert world.reported == []
    assert world.lines == []


def anothers(engine: Engine) -> Callable[[str], tuple[Logprob, ...]]:
    """Answer with the adapter of another, as one does that mixes up the rows of a batch."""
    return lambda prompt: engine.tokens(prompt, "two")


def forgotten(engine: Engine) -> Callable[[str], tuple[Logprob, ...]]:
    return lambda prompt: engine.tokens(prompt)


def forgotten_later(engine: Engine) -> Callable[[str], tuple[Logprob, ...]]:
    """Answer without the adapter from the second half on."""

    def tokens(prompt: str) -> tuple[Logprob, ...]:
        first = engine.tokens(prompt, "one", count=8)
        before = (prompt, *(each.token for each in first))
        rest: list[Logprob] = []
        for _ in range(8):
            rest.append(engine.next((*before, *(each.token for each in rest))))
        return (*first, *rest)

    return tokens


@pytest.mark.parametrize("precision", NOISE)
@pytest.mark.parametrize("fault", [anothers, forgotten, forgotten_later])
def test_a_wrong_adapter_is_found_in_an_answer_of_it(
    fault: Callable[[Engine], Callable[[str], tuple[Logprob, ...]]], precision: str, tmp_path: Path
) -> None:
    served = Served(precision, tmp_path)
    served.world.run(60)
    assert served.world.reported == []
    prompt = "Tell me"
    tokens = fault(served.engine)(prompt)
    asked = {"prompt": prompt, "adapter": "one"}
    served.offer(LiveAnswer.of("m", asked, tokens, len(prompt)))
    served.world.run_until(lambda: served.world.reported)
    found = served.world.reported[0].fault
    assert found is not None
    assert found.prompt == ""
    # What it answers now is right, and so are its known answers.
    served.world.run_until(lambda: len(served.world.reported) == 2)
    assert served.world.reported[1].fault is None
