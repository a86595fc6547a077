"""The engine of ``iterative`` alone: how close to the device's bandwidth, how far before others?"""

from __future__ import annotations

import gc
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from llmserve.runtime import Engine, Generation, Params
from llmserve.testing import ByteTokenizer
from llmserve_iterative import runner
from llmserve_iterative.attention import FlashPlan
from llmserve_iterative.on_cpu import replaced
from llmserve_iterative.runner import FlatRunner, Runner, make_runner
from plugins.tools.bench.shapes import SMALL, make_model, prompt_ids
from plugins.tools.gpu.results import PROFILE

from .common import Settings, seconds, settings

_CONTEXT = 16_384
_PROMPT = 20
_LONG = (1000, 8000)
_BANDWIDTH_BYTES = 2**31
_SHARE_WANTED = 0.7
_FACTOR_WANTED = 3.0
_WANTED_AT = 64

Ids = list[list[int]]
Way = Callable[[Ids, int], int]
"""Answers these prompts with so many tokens each; returns how many it made."""


def main() -> None:
    given = settings()
    dtype = "bfloat16" if given.cuda else "float32"
    bandwidth = measure_bandwidth(given)
    for shape in (SMALL,) if given.quick else ("1b", "7b"):
        given.results.table(f"{shape}, {dtype}: tokens/s (as a factor of generate())")
        with given.results.attempt(shape):
            model = make_model(
                shape, dtype, given.device, context=1024 if given.quick else _CONTEXT
            )
            measure_rates(given, model, shape, bandwidth)
        given.results.table(f"{shape}, {dtype}: seconds to the first token")
        with given.results.attempt("first token"):
            measure_first_tokens(given, model)
        if shape != "7b":
            given.results.table("One step of eight sequences, by operation")
            with given.results.attempt("profile"):
                profile(given, model)
        del model
        gc.collect()
        if given.cuda:
            torch.cuda.empty_cache()


def measure_bandwidth(given: Settings) -> float:
    """Return the bytes a second that a copy on the device reads and writes."""
    count = _BANDWIDTH_BYTES if given.cuda else 2**27
    source = torch.empty(count, dtype=torch.uint8, device=given.device).random_(0, 256)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(seconds(lambda: target.copy_(source), given.device) for _ in range(10))
    given.results.table("The device")
    given.results.add("copy", value=f"{2 * count / best / 1e9:.0f} GB/s read and written")
    given.results.add("processor", value=f"{platform.machine()}, {torch.get_num_threads()} threads")
    return 2 * count / best


def measure_rates(given: Settings, model: Any, shape: str, bandwidth: float) -> None:
    """Measure all ways in turns, so that what else the machine does affects all of them."""
    counts, tokens, rounds = ((1, 4), 8, 1) if given.quick else ((1, 8, 64, 256), 64, 3)
    ways: dict[str, Way] = {"generate()": partial(generate, model)}
    if hasattr(model, "generate_batch"):
        ways["generate_batch()"] = partial(generate_batch, model, max(counts))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    rates: dict[str, dict[int, float]] = {}
    runners: dict[str, str] = {}
    for name, way in ways.items():
        with given.results.attempt(name):
            rates[name] = rates_of(given, way, counts, tokens, rounds)
    ways_here = {"iterative": _AS_CHOSEN}
    if given.cuda:
        ways_here["iterative without graphs"] = _PLAIN
    elif given.quick:
        ways_here |= {"iterative, as on a GPU": _RECORDED, "the same without graphs": _PLAIN}
    for name, choice in ways_here.items():
        replacement = nullcontext() if given.cuda or choice is _AS_CHOSEN else replaced()
        with (
            given.results.attempt(name),
            replacement,
            refusals() as refused,
            engine_of(model, max(counts), choice=choice) as engine,
        ):
            runners[name] = "; ".join([describe(engine), *refused])
            rates[name] = rates_of(given, partial(answer, engine), counts, tokens, rounds)
    base = rates.get("generate()", {})
    for name, by_count in rates.items():
        share = by_count[1] * weights / bandwidth
        factors = {count: rate / base[count] for count, rate in by_count.items() if base}
        ok = None
        if name == "iterative" and given.cuda:
            # Small weights are read faster than a pass is started.
            near = share >= _SHARE_WANTED or shape != "7b"
            ok = near and factors.get(_WANTED_AT, _FACTOR_WANTED) >= _FACTOR_WANTED
        cells = {
            str(count): f"{rate:.0f}" + (f" ({factors[count]:.2f})" if factors else "")
            for count, rate in by_count.items()
        }
        cells["share of bandwidth at 1"] = f"{share:.0%}"
        given.results.add(name, ok, **cells, runner=runners.get(name, ""))


def rates_of(
    given: Settings, way: Way, counts: Sequence[int], tokens: int, rounds: int
) -> dict[int, float]:
    """Return the median of the tokens a second by the number of prompts."""
    rates: dict[int, list[float]] = {count: [] for count in counts}
    row = 0
    for turn in range(-1, rounds):
        for count in counts:
            # No prompt twice, since a cache would know it.
            prompts = [prompt_ids(row + n, _PROMPT) for n in range(count)]
            row += count
            made = 0

            def run() -> None:
                nonlocal made
                made = way(prompts, tokens)  # noqa: B023

            passed = seconds(run, given.device)
            if made != count * tokens:
                raise RuntimeError(f"{made} tokens instead of {count * tokens}")
            if turn >= 0:
                rates[count].append(made / passed)
    return {count: median(found) for count, found in rates.items()}


Choice = Callable[[Any, int], Runner]
_AS_CHOSEN: Choice = make_runner
_RECORDED: Choice = partial(FlatRunner, FlashPlan, graphs=True)
_PLAIN: Choice = partial(FlatRunner, FlashPlan)


@contextmanager
def engine_of(
    model: Any,
    most: int,
    *,
    choice: Choice = _AS_CHOSEN,
    cache_tokens: int = 0,
    prefill_chunk: int = 256,
) -> Iterator[Engine]:
    own_attention = model.config._attn_implementation
    try:
        yield Engine(
            choice(model, cache_tokens or 512 * most),
            ByteTokenizer(),
            max_sequences=most,
            prefill_chunk=prefill_chunk,
        )
    finally:
        # The engine replaces it, and the next one compares itself with the model's own.
        model.set_attn_implementation(own_attention)


@contextmanager
def refusals() -> Iterator[list[str]]:
    """Yield a list that gets why runners do not suit the model."""
    reasons: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: reasons.append(record.getMessage())  # type: ignore[method-assign]
    runner.LOG.addHandler(handler)
    runner.LOG.setLevel(logging.INFO)
    try:
        yield reasons
    finally:
        runner.LOG.removeHandler(handler)


def describe(engine: Engine) -> str:
    chosen = engine._runner
    if not isinstance(chosen, FlatRunner):
        return type(chosen).__name__
    recorded = "recorded as graphs" if chosen._graphs is not None else "not recorded"
    return f"{chosen._plan.__name__}, {recorded}"


def answer(engine: Engine, prompts: Ids, tokens: int) -> int:
    generations = admit(engine, prompts, tokens)
    while engine.busy:
        engine.step()
    return sum(len(generation.token_ids) for generation in generations)


def admit(engine: Engine, prompts: Ids, tokens: int) -> list[Generation]:
    generations = [
        Generation(ids, Params(), max_tokens=tokens, eos_ids=frozenset(), decode=lambda _: "")
        for ids in prompts
    ]
    for generation in generations:
        engine.admit(generation)
    return generations


@torch.inference_mode()
def generate(model: Any, prompts: Ids, tokens: int) -> int:
    ids = torch.tensor(prompts, device=model.device)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )
    return int(made[:, ids.shape[1] :].numel())


def generate_batch(model: Any, most: int, prompts: Ids, tokens: int) -> int:
    # By default it takes most of the memory for its cache, in every call.
    cache = ContinuousBatchingConfig(num_blocks=8 * most, max_batch_tokens=4096)
    ends = {"eos_token_id": -1, "pad_token_id": 0}
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, **ends)
    answers = model.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=cache,
        progress_bar=False,
    )
    return sum(len(answer.generated_tokens) for answer in answers.values())


def measure_first_tokens(given: Settings, model: Any) -> None:
    lengths = (64,) if given.quick else _LONG
    with engine_of(model, 2, cache_tokens=4 * max(lengths), prefill_chunk=2048) as engine:
        for row, length in enumerate(lengths, 1):
            prompts = [[prompt_ids(10_000 * row + turn, length)] for turn in range(3)]
            found = [
                seconds(partial(answer, engine, prompt, 1), given.device) for prompt in prompts
            ]
            given.results.add(f"{length} tokens", first=f"{found[0]:.3f}", best=f"{min(found):.3f}")


def profile(given: Settings, model: Any) -> None:
    """Write the operations of a step of single tokens, the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * given.cuda
    with engine_of(model, 8) as engine:
        admit(engine, [prompt_ids(90_000 + n, _PROMPT) for n in range(8)], 40)
        for _ in range(16):
            engine.step()
        with profiler(activities=activities) as found:
            passed = seconds(engine.step, given.device)
    device = "device" if given.cuda else "cpu"
    events = found.key_averages()
    table = events.table(sort_by=f"self_{device}_time_total", row_limit=25)
    (given.folder / PROFILE).write_text(table, encoding="utf-8")
    given.results.add("the whole step, with the profiler", ms=f"{1000 * passed:.2f}")
    taken = {event.key: getattr(event, f"self_{device}_time_total") for event in events}
    for key in sorted(taken, key=lambda key: -taken[key])[:8]:
        given.results.add(key[:60], ms=f"{taken[key] / 1000:.3f}")


if __name__ == "__main__":
    main()
