"""Measuring: one run, several models in turns, and many variants of one model."""

from __future__ import annotations

import os
import platform
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import product
from pathlib import Path

from llmserve import __version__
from llmserve.client import ModelInfo
from llmserve.errors import LLMServeError, ServerError, UsageError
from llmserve.registry import Registry
from llmserve_bench.figures import number, place_of
from llmserve_bench.generator import Job, LoadGenerator, OnProgress, Report, cost_of
from llmserve_bench.results import Case, Load, Record, Result, Run, Subject
from llmserve_bench.schedule import Prompts, make_schedule
from llmserve_bench.targets import OnStep, Target, Variant, building, check_variants, serving
from llmserve_bench.tokens import TokenCounter
from llmserve_bench.tools import TOOLS
from llmserve_bench.triton import GaugeSampler, Observer

Varied = Mapping[str, Sequence[str]]
LOADS = ("concurrency", "rate")
"""What a sweep may vary without another build."""
_SLACK = 0.35
"""By how much less than the best a variant may do in a round and still go on."""


@dataclass(frozen=True)
class Plan:
    """What is the same in all runs of a command; ``stream`` is None where the models decide."""

    prompts: Prompts
    stream: bool | None = None
    on_step: OnStep = lambda _: None
    on_progress: OnProgress = lambda _done, _seconds: None

    def fit(self, load: Load, infos: Sequence[ModelInfo], counter: TokenCounter) -> Load:
        """Fit a load to the models that get it: they stream where all of them can."""
        whole = [info.name for info in infos if info.exchange == "unary"]
        if self.stream and whole:
            problem = f"{', '.join(whole)} answers in one piece"
            raise UsageError(problem, mend="leave out --stream")
        stream = not whole if self.stream is None else self.stream
        return replace(load, stream=stream, prompts=self.prompts.describe(counter))

    def run(self, target: Target, info: ModelInfo, load: Load, counter: TokenCounter) -> Run:
        ours = info.made_by_llmserve is not None
        warmup, requests = make_schedule(load, self.prompts, counter, ignore_eos=ours)
        job = Job(target.url, target.model, ours, load, warmup, requests, len(requests))
        started = now()
        with Observer(target) as observer, LoadGenerator(job.split(load.processes)) as generator:
            cold = observer.look()
            generator.warm_up()
            before = observer.look_after(cold, len(warmup))
            with GaugeSampler(observer) as gauges:
                start, reports = generator.run(self.on_progress)
            records, seconds, unfinished = window(reports, load)
            after = observer.look_after(before, sum(len(report.records) for report in reports))
            server = observer.difference(before, after, gauges.between(start, start + seconds))
        return Run(
            started=started,
            seconds=seconds,
            records=_counted(records, reports, counter),
            server=server,
            generator=cost_of(reports),
            unfinished=unfinished,
            interrupted=any(report.interrupted for report in reports),
            ended_early=next((one.given_up for one in reports if one.given_up is not None), None),
        )


def bench(target: Target, load: Load, plan: Plan) -> Result:
    info, counter = target.info(), target.counter()
    load = plan.fit(load, [info], counter)
    plan.on_step(f"measuring {target.model}, {load.label}")
    run = plan.run(target, info, load, counter)
    case, ends = Case(target.subject, load, (run,)), (run.interrupted, run.ended_early)
    return Result("bench", case.subject.name, run.started, 1, machine(), (case,), *ends)


def with_tools(result: Result, target: Target, plan: Plan, names: Sequence[str]) -> Result:
    """Measure the same as a run with other tools; what goes wrong with one is told in a note."""
    (case,), (run,) = result.cases, result.runs
    if not names or not run.good or run.interrupted or run.ended_early:
        return result
    info, tools, failures = target.info(), [], []
    load = replace(case.load, requests=len(run.records), duration=None)
    ours = info.made_by_llmserve is not None
    _, requests = make_schedule(load, plan.prompts, target.counter(), ignore_eos=ours)
    for name in names:
        plan.on_step(f"measuring {target.model} with {name}")
        try:
            tools.append(TOOLS[name].measure(target, info, load, requests))
        except LLMServeError as error:
            failures.append(str(error))
    case = replace(case, runs=(replace(run, tools=tuple(tools)),))
    return replace(result, cases=(case,), problems=tuple(failures))


def compare(
    targets: Sequence[Target], loads: Sequence[Load], plan: Plan, *, rounds: int, title: str
) -> Result:
    """Measure every model under every load, in rounds.

    In a round all get the same prompts, lengths and arrival times, one after the other in an order
    that is drawn anew, so that what drifts on the machine meets all alike. Ctrl-C and a server
    that dies end it with what there is.
    """
    started, infos = now(), [target.info() for target in targets]
    # One tokenizer for all, so that the prompts are the same whoever answers them.
    counter = targets[0].counter()
    loads = [plan.fit(load, infos, counter) for load in loads]
    names = [target.subject.name for target in targets]
    turns = []
    for turn in range(rounds):
        draw = random.Random(f"order {loads[0].seed} {turn}")  # noqa: S311
        for which in range(len(loads)):
            turns += [(turn, which, who) for who in draw.sample(range(len(targets)), len(targets))]
    runs: dict[tuple[int, int], list[Run]] = {}
    interrupted, ended_early = False, None
    for at, (turn, which, who) in enumerate(turns, 1):
        label = f"round {turn + 1} of {rounds}: {names[who]}, {loads[which].label}"
        plan.on_step(f"{at}/{len(turns)} {label}")
        load = replace(loads[which], seed=loads[which].seed + turn)
        try:
            run = plan.run(targets[who], infos[who], load, counter)
            interrupted, ended_early = run.interrupted, run.ended_early
        except KeyboardInterrupt:
            interrupted = True
        except LLMServeError as error:
            if not runs:
                raise
            ended_early = str(error)
        # A run that was cut has fewer requests and another mix, so it is not like the others.
        if interrupted or ended_early:
            ended_early = ended_early and f"{label}: {ended_early}"
            break
        runs.setdefault((who, which), []).append(run)
    if not runs:
        raise LLMServeError(ended_early or "interrupted before a run was complete")
    cases = [
        Case(target.subject, load, tuple(runs.get((who, which), ())))
        for which, load in enumerate(loads)
        for who, target in enumerate(targets)
    ]
    title, ends = title or " against ".join(names), (interrupted, ended_early)
    return Result("compare", title, started, rounds, machine(), tuple(cases), *ends)


@dataclass
class Trial:
    """A case of a sweep, and the build that it needs."""

    variant: Variant
    case: Case

    @property
    def waits(self) -> bool:
        return self.case.state == "waiting"


def make_trials(
    plugin: str, model: str, varied: Varied, common: Mapping[str, str], load: Load
) -> list[list[Trial]]:
    """Give every combination of what is varied, those of the same build together."""
    found = []
    for build in combinations({key: v for key, v in varied.items() if key not in LOADS}):
        variant = Variant(describe(build) or plugin, plugin, {**common, **build})
        settings = {"plugin": plugin, "model": model, **variant.settings}
        subject, group = Subject(variant.label, variant.name, "", settings), []
        for own in combinations({key: v for key, v in varied.items() if key in LOADS}):
            if "concurrency" in own:
                load = replace(load, concurrency=int(own["concurrency"]))
            elif "rate" in own:
                load = replace(load, concurrency=None, rate=float(own["rate"]))
            case = Case(subject, load, varied={**build, **own}, state="waiting")
            group.append(Trial(variant, case))
        found.append(group)
    return found


def sweep(
    groups: Sequence[Sequence[Trial]], model: str, plan: Plan, registry: Registry, *, rounds: int
) -> Result:
    """Build every variant, then serve and measure each of them in rounds.

    Every round goes through all variants that can still win, so that what drifts on the machine
    meets all alike. A variant that cannot be built or served has failed, and the others go on.
    """
    started, interrupted = now(), False
    check_variants([group[0].variant for group in groups], model, registry)
    folders: dict[str, Path] = {}
    with ExitStack() as stack:
        try:
            for variant, group in ((group[0].variant, group) for group in groups):
                with _failing(group):
                    making = building([variant], model, registry, plan.on_step)
                    folders[variant.label] = stack.enter_context(making)
            for turn in range(rounds):
                for group in groups:
                    if any(trial.waits for trial in group):
                        with _failing(group):
                            folder = folders[group[0].variant.label]
                            _measure_group(group, model, folder, plan, f"{turn + 1} of {rounds}")
                if turn + 1 < rounds:
                    stop_losers([trial for group in groups for trial in group])
        except KeyboardInterrupt:
            interrupted = True
    cases = [trial.case for group in groups for trial in group]
    for at, case in enumerate(cases):
        if case.state == "waiting":
            cases[at] = replace(case, state="done" if case.runs else "not measured")
    title = f"{groups[0][0].variant.plugin} of {model}"
    return Result("sweep", title, started, rounds, machine(), tuple(cases), interrupted)


def _measure_group(group: Sequence[Trial], model: str, folder: Path, plan: Plan, turn: str) -> None:
    with serving([group[0].variant], model, folder, plan.on_step) as (target,):
        info, counter = target.info(), target.counter()
        for trial in (trial for trial in group if trial.waits):
            case = trial.case
            plan.on_step(f"round {turn}: {describe(case.varied)}")
            load = plan.fit(case.load, [info], counter)
            seeded = replace(load, seed=load.seed + len(case.runs))
            run = plan.run(target, info, seeded, counter)
            if run.interrupted:
                raise KeyboardInterrupt
            if run.ended_early is not None:
                raise ServerError(f"the server was gone while it was measured: {run.ended_early}")
            case = replace(case, subject=target.subject, load=load, runs=(*case.runs, run))
            if not run.good:
                why = f"every request failed: {run.records[0].message if run.records else ''}"
                case = replace(case, state="failed", why=why)
            trial.case = case


@contextmanager
def _failing(group: Iterable[Trial]) -> Iterator[None]:
    """Note an error as the reason why the trials of a build have failed."""
    try:
        yield
    except LLMServeError as error:
        for trial in (trial for trial in group if trial.waits):
            trial.case = replace(trial.case, state="failed", why=str(error))


def stop_losers(trials: Iterable[Trial]) -> None:
    """Stop what is far slower than the best within the limits, and cannot win any more."""
    places = {trial.case.name: place_of(trial.case) for trial in trials if trial.waits}
    rates = [place.throughput for place in places.values() if place and place.within]
    for trial in trials:
        place = places.get(trial.case.name)
        if place and place.throughput < max(rates, default=0.0) * (1 - _SLACK):
            why = f"{number(place.throughput)} a second, the best {number(max(rates))}"
            trial.case = replace(trial.case, state="stopped", why=why)


def parse_varied(texts: Iterable[str]) -> dict[str, list[str]]:
    """Read ``KEY=VALUE,VALUE`` as often as it was given.

    >>> parse_varied(["max_batch_size=4,8"])
    {'max_batch_size': ['4', '8']}
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        parts = list(dict.fromkeys(part.strip() for part in values.split(",") if part.strip()))
        if not (key and equals and parts):
            raise UsageError(f"{text!r} varies nothing", mend="write KEY=VALUE,VALUE")
        if key in found:
            raise UsageError(f"{key} is varied twice", mend="give all its values at once")
        found[key] = parts
    if len(found.keys() & set(LOADS)) > 1:
        raise UsageError("concurrency and rate cannot both be varied", mend="leave out one")
    for key, value in ((load, value) for load in LOADS for value in found.get(load, ())):
        whole = value.isdecimal() and int(value) > 0
        if not (whole or (key == "rate" and re.fullmatch(r"\d*\.\d*[1-9]\d*", value))):
            raise UsageError(f"{key}={value} is not a load", mend="give numbers above 0")
    return found


def combinations(varied: Varied) -> list[dict[str, str]]:
    """Give every combination of values.

    >>> combinations({"a": ["1", "2"], "b": ["x"]})
    [{'a': '1', 'b': 'x'}, {'a': '2', 'b': 'x'}]
    """
    return [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]


def describe(settings: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def window(reports: Sequence[Report], load: Load) -> tuple[list[Record], float, tuple[float, ...]]:
    """Give the requests that count, the seconds of the run, and how long others were under way.

    A duration ends a closed loop to the moment; otherwise the last answer does. Where the server
    was gone for good, that moment does: that somebody went on asking is no part of the load.
    """
    records = sorted((r for report in reports for r in report.records), key=lambda r: r.index)
    gone = min((report.gone for report in reports if report.gone is not None), default=None)
    until = max(report.seconds for report in reports)
    if gone is not None:
        records = [record for record in records if record.sent <= gone]
        return records, max((record.done for record in records), default=gone), ()
    if load.duration is not None and load.concurrency is not None:
        seconds = min(load.duration, until)
    elif any(report.interrupted for report in reports):
        seconds = until
    else:
        seconds = max((record.done for record in records), default=until)
    late = [record.sent for record in records if record.done > seconds]
    cut = [sent for report in reports for sent in report.cut]
    unfinished = tuple(max(0.0, seconds - sent) for sent in (*late, *cut))
    return [record for record in records if record.done <= seconds], seconds, unfinished


def _counted(
    records: Sequence[Record], reports: Sequence[Report], counter: TokenCounter
) -> tuple[Record, ...]:
    """Count the tokens that the model did not count, where its tokenizer is at hand."""
    texts = {index: pieces for report in reports for index, pieces in report.texts.items()}
    found = []
    for record in records:
        if counter.exact and record.index in texts:
            tokens = tuple(counter.count(text) if text else 0 for text in texts[record.index])
            record = replace(record, tokens=tokens, output_tokens=sum(tokens))
        found.append(record)
    return tuple(found)


def machine(proc: Path = Path("/proc")) -> dict[str, str]:
    """Describe this machine; what the system does not tell is left out."""
    gpus = sorted(proc.glob("driver/nvidia/gpus/*/information"))
    found = {
        "cores": str(os.cpu_count()),
        "cpu": _named("model name", proc / "cpuinfo"),
        "gpu": " and ".join(_named("Model", path) for path in gpus),
        "python": platform.python_version(),
        "llmserve": __version__,
    }
    return {key: value for key, value in found.items() if value}


def _named(key: str, path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found = re.search(rf"^{key}\s*:\s*(.*)$", text, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
