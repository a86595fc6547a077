"""The rows of the table, by name. Each makes one line or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from inprocess import engine_rate, generate_batch_rate, generate_rate, step_seconds
from loads import in_flight_against_static
from machine import read_bandwidth
from rounds import Line, Skipped, Target, in_turns
from stage import Stage

Row = Callable[[Stage], Iterator[Line | Skipped]]
TOKENS = 64
_UNIT = "tokens/s"


def whole_prefix(stage: Stage) -> Iterator[Line | Skipped]:
    """Ours against the tutorial's algorithm in the same Triton, both streaming."""
    baseline = stage.whole_prefix
    # It takes minutes for what we do in a second, so it makes fewer tokens. That is in its favour:
    # what it computes anew each time is shorter.
    tokens = 8 if stage.wishes.quick else 16
    for streams, target in ((8, 15.0), (32, 30.0)):
        sides = in_turns(
            stage.through_triton(streams, pieces=True),
            stage.served(baseline, streams, tokens, pieces=True),
            stage.wishes.rounds,
        )
        label = f"against the tutorial's algorithm, {streams} streams"
        yield Line(label, _UNIT, *sides, Target(target))


def generate(stage: Stage) -> Iterator[Line | Skipped]:
    """Ours through Triton against ``generate()`` in process."""
    for rows, target in zip(stage.wishes.batches, (2.0, 1.8, 1.6), strict=True):
        theirs = partial(generate_rate, stage.reference)
        yield _through_triton(stage, "generate()", rows, target, theirs)


def ctranslate2(stage: Stage) -> Iterator[Line | Skipped]:
    """Ours through Triton against CTranslate2 in process, int8."""
    if (worker := stage.ctranslate2) is None:
        yield Skipped("against CTranslate2", "no --ctranslate2-python given")
        return
    for rows, target in zip(stage.wishes.batches, (1.0, 1.5, 1.5), strict=True):
        yield _through_triton(stage, worker.name, rows, target, lambda p: worker.rate(p, TOKENS))


def openvino(stage: Stage) -> Iterator[Line | Skipped]:
    """Ours through Triton against OpenVINO GenAI's continuous batching in process."""
    if (worker := stage.openvino) is None:
        yield Skipped("against OpenVINO GenAI", "no --openvino-python given")
        return
    for rows in stage.wishes.batches:
        yield _through_triton(stage, worker.name, rows, 0.9, lambda p: worker.rate(p, TOKENS))


def triton(stage: Stage) -> Iterator[Line | Skipped]:
    """Ours through Triton against the same engine in process.

    Longer answers as well, because requests that come and go cost something each.
    """
    for tokens in (TOKENS, 3 * TOKENS):
        for rows in stage.wishes.batches:
            label = f"the same engine in process, {tokens} tokens"
            theirs = partial(_in_process, stage, tokens)
            yield _through_triton(stage, label, rows, 0.9, theirs, tokens)


def _in_process(stage: Stage, tokens: int, prompts: Sequence[list[int]]) -> float:
    return engine_rate(stage.engine, prompts, tokens)


def generate_batch(stage: Stage) -> Iterator[Line | Skipped]:
    """Ours through Triton against transformers' continuous batching."""
    theirs = partial(generate_batch_rate, stage.batching_reference)
    yield _through_triton(stage, "generate_batch()", 32, 4.0, theirs)


def _through_triton(
    stage: Stage,
    other: str,
    rows: int,
    target: float,
    theirs: Callable[[Sequence[list[int]]], float],
    tokens: int = TOKENS,
) -> Line:
    sides = in_turns(
        stage.through_triton(rows, tokens),
        lambda: theirs(stage.prompts.ids(rows)),
        stage.wishes.rounds,
    )
    return Line(f"against {other}, {rows} at a time", _UNIT, *sides, Target(target))


def step(stage: Stage) -> Iterator[Line | Skipped]:
    """One decode step at batch 1 against reading the weights once, and far against near."""
    read = stage.weight_bytes
    milliseconds = in_turns(
        lambda: step_seconds(stage.engine, 60) * 1e3,
        lambda: read / read_bandwidth(stage.wishes.device) * 1e3,
        stage.wishes.rounds,
    )
    label = f"a step at batch 1 against reading {read / 1e6:.0f} MB of weights"
    yield Line(label, "ms", *milliseconds, Target(1.6, at_least=False))


def context(stage: Stage) -> Iterator[Line | Skipped]:
    """A token after 900 others against one after 60."""
    milliseconds = in_turns(
        lambda: step_seconds(stage.engine, 900) * 1e3,
        lambda: step_seconds(stage.engine, 60) * 1e3,
        stage.wishes.rounds,
    )
    label = "a token at context 900 against 60"
    yield Line(label, "ms", *milliseconds, Target(1.3, at_least=False))


ROWS: Mapping[str, Row] = {
    "whole-prefix": whole_prefix,
    "in-flight": in_flight_against_static,
    "generate": generate,
    "ctranslate2": ctranslate2,
    "openvino": openvino,
    "triton": triton,
    "generate-batch": generate_batch,
    "step": step,
    "context": context,
}
