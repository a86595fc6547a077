"""Constraints that are made to exhaust llguidance: they are refused, and nothing else suffers."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llguidance
import numpy as np
import pytest

import llmserve.demo
from llmserve.runtime import Generation, RequestError, Sampler, TransformersTokenizer
from llmserve.runtime.answer.compiling import _MAX_WAITING, Compiled, Compiler
from llmserve.runtime.answer.constrained import FormConstraint
from llmserve.runtime.answer.judge import Judge, compiled, grammar_of
from llmserve.runtime.answer.rewriting import enforceable
from llmserve.runtime.answer.text_formatter import TextFormatter
from llmserve.runtime.drivers.batch import BatchDriver
from llmserve.runtime.protocols import Tokenizer
from llmserve.testing import FakeRequest, fake, make_parts

FOLDER = Path(llmserve.demo.__file__).parent / "model"
TOKENIZER = TransformersTokenizer({"path": "."}, FOLDER)


def chain(length: int, link: str) -> str:
    """Return a schema whose definitions refer to one another."""
    links: dict[str, Any] = {
        f"n{number}": json.loads(link.replace("NEXT", f"#/$defs/n{number + 1}"))
        for number in range(length)
    }
    return json.dumps({"$defs": {**links, f"n{length}": {"type": "null"}}, "$ref": "#/$defs/n0"})


def rules(count: int, name: str) -> str:
    lines = [f"{name}{number}: {name}{number + 1}" for number in range(count)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{count}: "a"'])


BOMBS = {
    "repeated repetitions": ("regex", "(a{1000}){1000}"),
    "three levels of them": ("regex", "((a{100}){100}){100}"),
    "many repetitions": ("regex", "a{100000000}"),
    "many levels": ("regex", "(" * 100 + "a" + "{9})" * 100),
    "a pattern": ("json_schema", json.dumps({"type": "string", "pattern": "^(a{1000}){1000}$"})),
    "alternatives": ("regex", "|".join(f"w{number:05d}" for number in range(9000))),
    "patterns in common": (
        "json_schema",
        json.dumps({"allOf": [{"pattern": f"^.*a.{{{n}}}b.*$"} for n in range(1, 30)]}),
    ),
    "terminals in common": (
        "grammar",
        "start: T\nT: " + " & ".join(f"/.*a.{{{n}}}b.*/" for n in range(1, 30)),
    ),
    "a large divisor": ("json_schema", json.dumps({"type": "integer", "multipleOf": 1000003})),
    "divisors": (
        "json_schema",
        json.dumps({"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949)]}),
    ),
    "an enum of objects": ("json_schema", json.dumps({"enum": [{"a": n} for n in range(4000)]})),
    "many properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{n}": {} for n in range(5000)}}),
    ),
    "a long constant": ("json_schema", json.dumps({"const": "x" * 60_000})),
    "many items": (
        "json_schema",
        json.dumps({"type": "array", "minItems": 10**6, "items": {"type": "string"}}),
    ),
    "a long text": ("json_schema", json.dumps({"type": "string", "minLength": 10**6})),
    # These overflow the stack of the process that compiles them.
    "references": ("json_schema", chain(900, '{"properties": {"a": {"$ref": "NEXT"}}}')),
    "rules": ("grammar", rules(4000, "r")),
    "terminals": ("grammar", rules(4000, "T")),
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler(TOKENIZER, TOKENIZER.eos_ids)
    yield compiler
    compiler.close()


class Even:
    """A generator to which all tokens are alike."""

    context_length: int | None = 100
    eos_ids = TOKENIZER.eos_ids

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        for generation in generations:
            sampler = Sampler(generation, tokenizer)
            while not generation.done:
                generation.push(sampler.choose(np.zeros(1024)))


def megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    return pages * resource.getpagesize() / 1e6


def refusal(future: Future[Compiled]) -> str | None:
    try:
        future.result(timeout=60)
    except RequestError as error:
        return str(error)
    return None


def test_what_is_kept_of_large_forms_is_bounded() -> None:
    compiler = Compiler(TOKENIZER, TOKENIZER.eos_ids)
    assert refusal(compiler.start(("regex", "yes|no"))) is None
    before = megabytes()
    for number in range(24):
        compiler.start(("regex", f"(a{{{200 + number}}}b){{300}}")).exception()
    grown = megabytes() - before
    last = ("regex", f"(a{{{200 + 23}}}b){{300}}")
    one, other = compiler.start(last), compiler.start(last)
    # On a busy machine it may take too long.
    if one.exception() is None:
        assert one.result() is other.result()
    compiler.close()
    # All of them take 400 MB.
    assert grown < 200


def test_a_bomb_costs_this_process_little_time_and_memory(compiler: Compiler) -> None:
    assert refusal(compiler.start(("regex", "yes|no"))) is None
    before = megabytes()
    costs, refusals = {}, {}
    for name, form in BOMBS.items():
        began = time.process_time()
        refusals[name] = refusal(compiler.start(form))
        costs[name] = time.process_time() - began
        assert refusal(compiler.start(("regex", f"still|{len(costs)}"))) is None
    # Compiled here they take 3 to 15 s; the limit on the process that tries them first is 0.1 s.
    assert max(costs.values()) < 1.5, costs
    assert megabytes() - before < 200
    # Which limit it meets first depends on the machine.
    ends = ("compiling it takes too long", "it is too large")
    assert str(refusals["terminals in common"]).endswith(ends)
    for name in ("references", "rules", "terminals"):
        assert str(refusals[name]).endswith("cannot be enforced: it is too large")


@pytest.mark.parametrize(
    "form", [BOMBS["a pattern"], ("grammar", 'start: "x" T\nT: /(a{1000}){9}/')]
)
def test_a_bomb_that_goes_off_late_costs_a_step_little(form: tuple[str, str]) -> None:
    """Compiling the first takes half of what is allowed, so on a busy machine it may be refused."""
    table = llguidance.LLTokenizer(TOKENIZER.tokenizer_json(), eos_token=min(TOKENIZER.eos_ids))
    matcher = compiled(llguidance, table, grammar_of(llguidance.LLMatcher, enforceable, *form))
    first = '"' if form[0] == "json_schema" else "x"
    began = time.process_time()
    matcher.compute_bitmask()
    matcher.consume_tokens(TOKENIZER.encode(first, special=False))
    matcher.compute_bitmask()
    assert time.process_time() - began < 0.5


def test_a_refusal_is_remembered(compiler: Compiler) -> None:
    first = compiler.start(BOMBS["divisors"])
    assert refusal(first)
    assert compiler.start(BOMBS["divisors"]) is first


@pytest.mark.parametrize("kept", [RequestError("refused"), ValueError("a fault")])
def test_a_form_that_is_kept_keeps_no_request_that_asked_for_it(kept: Exception) -> None:
    form: Future[Compiled] = Future()
    form.set_exception(kept)

    def ask() -> weakref.ref[Generation]:
        generation = fake.generation(b"p", 9)
        generation.constraint = FormConstraint(generation, form)
        with pytest.raises((RequestError, RuntimeError), match=str(kept)) as raised:
            generation.settle()
        assert isinstance(raised.value, RequestError) == isinstance(kept, RequestError)
        return weakref.ref(generation)

    references = [ask() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert kept.__traceback__ is None


def test_too_many_new_constraints_are_refused_and_known_ones_are_not() -> None:
    compiler = Compiler(TOKENIZER, TOKENIZER.eos_ids)
    known = compiler.start(("regex", "known"))
    for number in range(_MAX_WAITING - 1):
        compiler.start(("regex", f"(a{{1000}}){{1000}}{number}"))
    more = (compiler.start(("regex", f"(b{{1000}}){{1000}}{n}")) for n in range(_MAX_WAITING))
    with pytest.raises(RequestError) as caught:
        list(more)
    assert caught.value.code == "constraint_queue_full"
    assert compiler.start(("regex", "known")) is known
    compiler.close()


def test_a_closed_formatter_compiles_nothing_that_still_waits() -> None:
    formatter = TextFormatter({}, FOLDER)
    constraints = []
    for number in range(_MAX_WAITING):
        bomb = f"{number}(a{{1000}}){{1000}}"
        generation = fake.generation(b"p", 9, eos=TOKENIZER.eos_ids, regex=bomb)
        constraints.append(formatter.constrain(generation, TOKENIZER))
    formatter.close()
    formatter.close()
    latest: Any = constraints[-1]
    assert not latest.pending
    with pytest.raises(CancelledError):
        latest.settle()


def test_a_killed_judge_is_replaced(compiler: Compiler) -> None:
    assert refusal(compiler.start(("regex", "before"))) is None
    assert compiler._judge is not None
    os.kill(compiler._judge.pid, signal.SIGKILL)
    assert refusal(compiler.start(("regex", "after"))) is None


def test_a_failure_that_is_not_the_forms_is_not_remembered(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("llmserve.runtime.answer.compiling.compiled", lambda *_: 1 / 0)
        assert compiler.start(("regex", "fault")).exception(60)
    assert refusal(compiler.start(("regex", "fault"))) is None


def test_a_tokenizer_that_the_judge_cannot_read_is_a_refusal_that_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    class Counted(Judge):
        def __init__(self, *arguments: Any) -> None:
            started.append("")
            super().__init__(*arguments)

    monkeypatch.setattr("llmserve.runtime.answer.compiling.Judge", Counted)
    tokenizer: Any = SimpleNamespace(tokenizer_json=lambda: "{}")
    compiler = Compiler(tokenizer, TOKENIZER.eos_ids)
    for text in ("a", "b"):
        said = refusal(compiler.start(("regex", text)))
        assert "cannot be constrained: llguidance refuses its tokenizer: " in str(said)
    assert len(started) == 1
    compiler.close()


def test_a_bomb_in_a_batch_fails_alone() -> None:
    driver = BatchDriver({}, Path())
    formatter = TextFormatter({}, FOLDER)
    options = ["regex", "grammar", "temperature"]
    parts = make_parts(Even(), tokenizer=TOKENIZER, formatter=formatter, inputs=options)
    driver.start(parts)
    constraints: list[dict[str, Any]] = [
        {"regex": "yes"},
        {"grammar": BOMBS["terminals"][1]},
        {},
    ]
    requests = [
        FakeRequest({"text_input": ["Hello"]}, max_tokens=4, **constraint)
        for constraint in constraints
    ]
    driver.execute(requests)
    assert [request.error for request in requests] == [
        None,
        "the grammar cannot be enforced: it is too large",
        None,
    ]
    assert requests[0].text == "yes"
    formatter.close()
