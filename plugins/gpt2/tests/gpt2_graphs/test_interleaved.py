"""Greedy answers are those of generate(), whoever runs beside them and however they are asked."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .models import CONTEXT, VOCAB, Reference, make_model
from .session import END, START, Session, export_to, piece, request, tokens

_PROMPT = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=12).map(tuple)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module", params=["onnx", "torchscript"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    home: Path = tmp_path_factory.mktemp(request.param) / "graph"
    exported = export_to(request.param, home, make_model())
    # What checks the graph would report its use over the network.
    assert request.param != "onnx" or os.environ["ORT_DISABLE_TELEMETRY"] == "1"
    return Session(request.param, home, exported)


@pytest.mark.parametrize("count", [1, 8])
def test_interleaved_sequences_answer_as_generate_does(
    made: Session, reference: Reference, count: int
) -> None:
    @settings(
        max_examples=4 if count > 4 else 8, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        wanted = {
            key: (data.draw(_PROMPT), data.draw(st.integers(1, 10))) for key in range(1, count + 1)
        }
        told: dict[int, list[int]] = {}
        while going := [key for key in wanted if len(told.get(key, ())) < wanted[key][1]]:
            chosen = data.draw(st.lists(st.sampled_from(going), min_size=1, unique=True))
            asked = {}
            for key in chosen:
                prompt, length = wanted[key]
                step = data.draw(st.integers(1, 5))
                begins = key not in told
                asked[key] = request(
                    key,
                    prompt if begins else (),
                    step=step,
                    flags=START if begins else 0,
                    **({"max_tokens": length} if begins else {}),
                )
            made.ask(*asked.values())
            for key, answered in asked.items():
                told.setdefault(key, []).extend(tokens(answered))
        assert told == {
            key: reference.tokens(prompt, length) for key, (prompt, length) in wanted.items()
        }
        made.ask(*(request(key, flags=END, step=0) for key in wanted))
        assert made.open == 0

    run()


def test_sequences_of_different_lengths_share_a_batch(made: Session, reference: Reference) -> None:
    prompts = {1: (5,), 2: tuple(range(3, 15)), 3: (9, 8, 7)}
    starts = [request(key, p, flags=START, max_tokens=20, step=1) for key, p in prompts.items()]
    made.ask(*starts)
    made.generator.batches.clear()
    steps = {key: request(key, step=6) for key in prompts}
    made.ask(*steps.values())
    for key, first in zip(prompts, starts, strict=True):
        assert tokens(first) + tokens(steps[key]) == reference.tokens(prompts[key], 7)
    assert made.generator.batches.count(3) >= 5
    made.ask(*(request(key, flags=END, step=0) for key in prompts))


def test_groups_that_take_turns_are_given_a_moment_to_meet(made: Session) -> None:
    keys = {1: (5,), 2: (6,)}
    made.ask(*(request(key, p, flags=START, max_tokens=90, step=1) for key, p in keys.items()))
    made.pauses.clear()
    made.ask(request(1, step=4))
    made.ask(request(2, step=4))
    assert len(made.pauses) == 2
    assert 0 < max(made.pauses) < 1.0
    made.ask(*(request(key, step=4) for key in keys))
    assert len(made.pauses) == 2, "all are here: nobody has to be waited for"
    made.ask(*(request(key, flags=END, step=0) for key in keys))


def test_a_step_without_a_start_harms_nobody(made: Session, reference: Reference) -> None:
    first = request(1, (4, 5), flags=START, max_tokens=6, step=2)
    lost, late = request(2, step=2), request(1, step=4)
    made.ask(first, lost)
    made.ask(late)
    assert "there is no sequence 2" in str(lost.error)
    assert tokens(first) + tokens(late) == reference.tokens((4, 5), 6)
    made.ask(request(1, flags=END, step=0))


@pytest.mark.parametrize(
    ("prompt", "params", "told"),
    [((7,), {}, "once"), ((), {"temperature": 0.5}, "temperature is said with")],
)
def test_what_belongs_to_the_start_is_refused_later(
    made: Session, reference: Reference, prompt: tuple[int, ...], params: dict[str, Any], told: str
) -> None:
    first = request(1, (4, 5), flags=START, max_tokens=4, step=2)
    made.ask(first)
    later = request(1, prompt, **params)
    made.ask(later)
    assert told in str(later.error)
    rest = request(1, step=4)
    made.ask(rest)
    assert tokens(first) + tokens(rest) == reference.tokens((4, 5), 4)
    made.ask(request(1, flags=END, step=0))


def test_a_step_of_no_tokens_computes_nothing(made: Session, reference: Reference) -> None:
    made.generator.batches.clear()
    first, second = request(1, (4, 5), flags=START, step=0, max_tokens=3), request(1, step=0)
    made.ask(first)
    made.ask(second)
    assert tokens(first) == tokens(second) == made.generator.batches == []
    rest = request(1, step=3)
    made.ask(rest)
    assert tokens(rest) == reference.tokens((4, 5), 3)
    made.ask(request(1, flags=END, step=0))


def test_the_end_may_come_with_the_last_step_and_all_so_far_with_each(
    made: Session, reference: Reference
) -> None:
    first = request(1, (4, 5), flags=START, max_tokens=9, step=2)
    last = request(1, flags=END, step=3)
    made.ask(first)
    made.ask(last)
    assert tokens(first) + tokens(last) == reference.tokens((4, 5), 5)
    assert made.open == 0
    pieces = [piece(step.responses[0]) for step in (first, last)]
    so_far = [piece(step.responses[0], "so_far") for step in (first, last)]
    assert so_far == [pieces[0], pieces[0] + pieces[1]]


def test_a_full_context_ends_a_sequence(made: Session, reference: Reference) -> None:
    prompt = tuple(3 + at % 90 for at in range(CONTEXT - 4))
    whole = request(1, prompt, flags=START, step=16, max_tokens=4)
    beside = request(2, (6,), flags=START, step=8, max_tokens=8)
    over = request(3, prompt, flags=START, max_tokens=5)
    made.ask(whole, beside, over)
    assert tokens(whole) == reference.tokens(prompt, 4)
    assert tokens(beside) == reference.tokens((6,), 8)
    assert "context of 96" in str(over.error)
    made.ask(*(request(key, flags=END, step=0) for key in (1, 2)))


def test_thousands_of_sequences_opened_and_abandoned_leave_memory_flat(tmp_path: Path) -> None:
    home = tmp_path / "graph"
    exported = export_to("torchscript", home, make_model(n_layer=1))
    session = Session("torchscript", home, exported, moment=0.001, slots=8)

    def abandon(first: int, count: int) -> int:
        for key in range(first, first + count, 8):
            session.ask(*(request(key + at, (3, 4), flags=START, max_tokens=9) for at in range(8)))
        gc.collect()
        assert session.open <= 16
        return 4096 * int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])

    warm = abandon(1, 1000)
    assert abandon(10_001, 4000) - warm < 16 << 20
