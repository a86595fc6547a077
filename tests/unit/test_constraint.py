"""What a formatter holds an answer to: heeded by whoever chooses tokens, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.builder.build import contract_of
from llmserve.builder.plan import BuildSpec, make_plan
from llmserve.registry import Entry, Registry, find_plugins
from llmserve.roles import Formatter, Generator, Recipe
from llmserve.runtime import contract
from llmserve.runtime.batch import BatchDriver
from llmserve.runtime.contract import Tensor
from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Constraint, Generation
from llmserve.runtime.protocols import Tokenizer
from llmserve.runtime.sampling import Sampler
from llmserve.runtime.text_formatter import TextFormatter
from llmserve.testing import ByteTokenizer, FakeRequest, make_parts
from tests import support
from tests.support import drive

DIGITS = list(b"0123456789")
WISH = Tensor("only_digits", "TYPE_BOOL")


def digits(scores: Any) -> None:
    kept = scores[DIGITS]
    scores[:] = -np.inf
    scores[DIGITS] = kept


def nothing(scores: Any) -> None:
    scores[:] = -np.inf


class Digits(TextFormatter):
    def constrain(self, generation: Generation, tokenizer: Tokenizer) -> Constraint | None:
        wish = generation.params.extra.get("only_digits", False)
        if wish not in (True, False):
            raise RequestError(f"only_digits takes true or false, not {wish!r}")
        return digits if wish else None


class Liking:
    """A generator that likes some bytes better than others; ``heedless`` ones ask nobody."""

    context_length: int | None = 100
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, *, heedless: bool = False) -> None:
        self._heedless = heedless

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        rows = [(generation, Sampler(generation, tokenizer)) for generation in generations]
        scores = np.zeros(256)
        scores[[ord("z"), ord("7")]] = 9, 5
        while not all(generation.done for generation in generations):
            for generation, sampler in rows:
                generation.push(ord("z") if self._heedless else sampler.choose(scores))


def answer(wish: object, *, heedless: bool = False, **asked: Any) -> FakeRequest:
    """Answer a request that has this wish, beside one without any."""
    held, free = (
        FakeRequest({"text_input": ["ab"]}, max_tokens=4, **more)
        for more in ({"only_digits": wish, **asked}, {})
    )
    inputs = ["temperature", "seed", WISH.name]
    drive(Liking(heedless=heedless), held, free, formatter=Digits({}, Path()), inputs=inputs)
    assert free.text == "zzzz"
    return held


def generation(constraint: Constraint | None) -> Generation:
    one = support.generation(b"p", 9)
    one.constraint = constraint
    return one


def test_one_request_of_a_batch_is_held_and_its_neighbour_is_free() -> None:
    assert answer(True).text == "7777"


def test_what_is_drawn_is_drawn_from_what_fits() -> None:
    for seed in range(20):
        assert answer(True, temperature=50.0, seed=seed).text.isdigit()


def test_a_wish_that_the_formatter_does_not_understand_is_refused_alone() -> None:
    assert answer("some").error == "only_digits takes true or false, not 'some'"


def test_a_generator_that_asks_nobody_is_found_out_at_its_first_token() -> None:
    held = answer(True, heedless=True)
    assert "did not ask what may come next" in str(held.error)
    assert held.text == ""


def test_asking_once_is_not_enough() -> None:
    one = generation(digits)
    one.constrain(np.zeros(256))
    one.push(DIGITS[0])
    with pytest.raises(RuntimeError, match="did not ask"):
        one.push(DIGITS[0])
    assert one.text == "0"


def test_a_constraint_that_nothing_fits_is_told_to_who_asked() -> None:
    with pytest.raises(RequestError, match="nothing may come next"):
        Sampler(generation(nothing), ByteTokenizer()).choose(np.zeros(256))


def test_the_likeliest_is_not_the_answer_where_something_is_forbidden() -> None:
    assert generation(None).plain
    assert not generation(digits).plain


@pytest.mark.parametrize("constrains", [True, False])
def test_a_wish_is_declared_where_the_generator_can_grant_it(constrains: bool) -> None:
    registry = Registry(find_plugins({"LLMSERVE_PLUGINS": "hf"}))
    runtime = "llmserve.runtime.batch:BatchDriver"
    made = (
        Generator(name="liking", summary="", runtime=runtime, constrains=constrains),
        Formatter(
            name="digits", summary="", runtime="llmserve.runtime.text_formatter:TextFormatter",
            inputs=(*contract.TEXT_FORMAT_INPUTS, WISH), outputs=(contract.TEXT_OUTPUT,),
        ),
        Recipe(name="digital", summary="", generator="liking", formatter="digits"),
    )  # fmt: skip
    for one in made:
        entry = Entry(one, type(one).__name__.lower(), registry.plugins[0])
        registry.entries.append(entry)
    told = contract_of(make_plan(BuildSpec("digital", "demo"), registry))
    assert told["extras"] == ["only_digits"]
    assert ("only_digits" in told["inputs"]) == constrains


def test_a_wish_that_cannot_be_granted_is_refused_by_its_name() -> None:
    """As a parameter; Triton itself refuses a tensor that is not declared."""
    parts = make_parts(Liking(), formatter=Digits({}, Path()), inputs=[WISH.name])
    driver = BatchDriver({}, Path())
    driver.start(replace(parts, inputs=parts.inputs - {WISH.name}))
    held = FakeRequest({"text_input": ["ab"]}, only_digits=True)
    driver.execute([held])
    assert held.error == "this model does not take only_digits"
