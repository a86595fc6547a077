"""Constraints of a formatter: a generator obeys them, or the request is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.builder.build import contract_of
from llmserve.builder.plan import BuildSpec, make_plan
from llmserve.contract.tensors import Tensor
from llmserve.plugins.registry import Entry, Registry, find_plugins
from llmserve.plugins.roles import Formatter, Generator, Recipe
from llmserve.runtime import contract
from llmserve.runtime.answer.generation import Constraint, Generation
from llmserve.runtime.answer.sampling import Sampler
from llmserve.runtime.answer.text_formatter import TextFormatter
from llmserve.runtime.drivers.batch import BatchDriver
from llmserve.runtime.errors import RequestError
from llmserve.runtime.protocols import Tokenizer
from llmserve.testing import ByteTokenizer, FakeRequest, fake, make_parts
from tests.support import drive

DIGITS = list(b"0123456789")
ONLY_DIGITS = Tensor("only_digits", "TYPE_BOOL")


def digits(scores: Any) -> None:
    kept = scores[DIGITS]
    scores[:] = -np.inf
    scores[DIGITS] = kept


def nothing(scores: Any) -> None:
    scores[:] = -np.inf


class Digits(TextFormatter):
    def constrain(self, generation: Generation, tokenizer: Tokenizer) -> Constraint | None:
        value = generation.params.extra.get("only_digits", False)
        if value not in (True, False):
            raise RequestError(f"only_digits takes true or false, not {value!r}")
        return digits if value else None


class Biased:
    """A generator that prefers some bytes to others; a ``heedless`` one ignores constraints."""

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


def answer(only_digits: object, *, heedless: bool = False, **parameters: Any) -> FakeRequest:
    """Answer a request with this value of only_digits, together with one without it."""
    constrained, free = (
        FakeRequest({"text_input": ["ab"]}, max_tokens=4, **values)
        for values in ({"only_digits": only_digits, **parameters}, {})
    )
    inputs = ["temperature", "seed", ONLY_DIGITS.name]
    generator, formatter = Biased(heedless=heedless), Digits({}, Path())
    drive(generator, constrained, free, formatter=formatter, inputs=inputs)
    assert free.text == "zzzz"
    return constrained


def generation(constraint: Constraint | None) -> Generation:
    new = fake.generation(b"p", 9)
    new.constraint = constraint
    return new


def test_one_request_of_a_batch_is_constrained_and_its_neighbour_is_free() -> None:
    assert answer(True).text == "7777"


def test_sampling_draws_only_allowed_tokens() -> None:
    for seed in range(20):
        assert answer(True, temperature=50.0, seed=seed).text.isdigit()


def test_a_value_that_the_formatter_does_not_understand_is_refused_alone() -> None:
    assert answer("some").error == "only_digits takes true or false, not 'some'"


def test_a_generator_that_ignores_the_constraint_fails_at_its_first_token() -> None:
    request = answer(True, heedless=True)
    assert "without calling constrain()" in str(request.error)
    assert request.text == ""


def test_a_constraint_must_be_applied_to_every_token() -> None:
    constrained = generation(digits)
    constrained.constrain(np.zeros(256))
    constrained.push(DIGITS[0])
    with pytest.raises(RuntimeError, match="without calling constrain"):
        constrained.push(DIGITS[0])
    assert constrained.text == "0"


def test_a_constraint_that_forbids_everything_is_an_error_of_the_request() -> None:
    with pytest.raises(RequestError) as refused:
        Sampler(generation(nothing), ByteTokenizer()).choose(np.zeros(256))
    assert refused.value.code == "conflicting_options"


def test_a_constrained_generation_is_not_plain() -> None:
    assert generation(None).plain
    assert not generation(digits).plain


@pytest.mark.parametrize("constrains", [True, False])
def test_an_extra_input_is_declared_if_the_generator_applies_constraints(constrains: bool) -> None:
    registry = Registry(find_plugins({"LLMSERVE_PLUGINS": "hf"}))
    runtime = "llmserve.runtime:BatchDriver"
    components = (
        Generator(name="biased", summary="", runtime=runtime, constrains=constrains),
        Formatter(
            name="digits", summary="", runtime="llmserve.runtime:TextFormatter",
            inputs=(*contract.TEXT_FORMAT_INPUTS, ONLY_DIGITS), outputs=(contract.TEXT_OUTPUT,),
        ),
        Recipe(name="digital", summary="", generator="biased", formatter="digits"),
    )  # fmt: skip
    for component in components:
        entry = Entry(component, type(component).__name__.lower(), registry.plugins[0])
        registry.entries.append(entry)
    built = contract_of(make_plan(BuildSpec("digital", "demo"), registry))
    assert built["extras"] == ["only_digits"]
    assert ("only_digits" in built["inputs"]) == constrains


def test_an_extra_input_that_is_not_declared_is_refused_by_its_name() -> None:
    """It arrives as a parameter; Triton itself refuses a tensor that is not declared."""
    parts = make_parts(Biased(), formatter=Digits({}, Path()), inputs=[ONLY_DIGITS.name])
    driver = BatchDriver({}, Path())
    driver.start(replace(parts, inputs=parts.inputs - {ONLY_DIGITS.name}))
    request = FakeRequest({"text_input": ["ab"]}, only_digits=True)
    driver.execute([request])
    assert request.error == "this model does not take only_digits"
