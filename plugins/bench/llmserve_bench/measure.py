"""Measurements: one run, several models in interleaved rounds, and variants of one model."""

from __future__ import annotations

import os
import platform
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import product
from pathlib import Path

from llmserve import __version__
from llmserve.client import ModelInfo
from llmserve.errors import LLMServeError, UsageError
from llmserve.plugin import Registry
from llmserve.runtime import contract
from llmserve_bench.generator import LoadGenerator, LoadShare, OnProgress, Report, cost_of
from llmserve_bench.losses import PROMPTS, losses
from llmserve_bench.prompts import Prompts, TokenCounter, make_schedule
from llmserve_bench.results import Case, Load, Loss, Record, Result, Run, Subject
from llmserve_bench.targets import OnStep, Target, Variant, serving
from llmserve_bench.tools import TOOLS
from llmserve_bench.triton import Observer

_MOST_ANSWERS = 64
LOADS = {"concurrency": int, "rate": float}
"""Settings that a sweep can vary without another build."""


@dataclass(frozen=True)
class Plan:
    """What all runs of a command share; ``stream`` is None if the models decide.

    ``texts`` is how many texts a request has, None if it was not chosen.
    """

    prompts: Prompts
    stream: bool | None = None
    texts: int | None = None
    counter: TokenCounter | None = None
    on_step: OnStep = lambda _: None
    on_progress: OnProgress = lambda _done, _seconds: None

    def fit(self, load: Load, infos: Sequence[ModelInfo], counter: TokenCounter) -> Load:
        """Adapt a load to the models that get it: they stream if all of them can."""
        texts = self._texts(infos)
        if load.images:
            _check_that_all_see(infos)
        whole = [info.name for info in infos if info.exchange == "unary"]
        if self.stream and whole:
            problem = f"{', '.join(whole)} cannot stream"
            raise UsageError(problem, hint="leave out --stream")
        stream = not whole if self.stream is None else self.stream
        prompts = self.prompts.describe(counter) + (f", {texts} a request" if texts > 1 else "")
        return replace(load, stream=stream, texts=texts, prompts=prompts)

    def _texts(self, infos: Sequence[ModelInfo]) -> int:
        """Return how many texts a request has; 0 if the models generate text."""
        generate = [info.name for info in infos if info.task in (contract.GENERATE, "")]
        if not generate:
            self._refuse_for_values(infos[0])
            return self.texts or 1
        if len(generate) < len(infos):
            others = sorted({info.name for info in infos} - set(generate))
            problem = f"{generate[0]} generates text, and {others[0]} does not"
            raise UsageError(problem, hint="compare models that are for the same")
        if self.texts is not None:
            raise UsageError(f"{generate[0]} generates text", hint="leave out --texts")
        return 0

    def _refuse_for_values(self, info: ModelInfo) -> None:
        for flag, given in (
            ("--stream", self.stream),
            ("--output-tokens", self.prompts.output_tokens),
        ):
            if given:
                problem = f"{info.name} {contract.task_of(info.task).does}"
                raise UsageError(problem, hint=f"leave out {flag}")

    def losses(
        self, targets: Sequence[Target], counter: TokenCounter
    ) -> tuple[tuple[Loss, ...], list[str]]:
        """Compare what the models answer to the prompts of the data set, or to some of our own."""
        prompts: Sequence[str] = PROMPTS
        if self.prompts.dataset is not None:
            draw = random.Random("answers")  # noqa: S311
            prompts = [s.text for s in self.prompts.samples(counter, _MOST_ANSWERS, draw)]
        return losses(targets, prompts, self.on_step)

    def run(self, target: Target, info: ModelInfo, load: Load, counter: TokenCounter) -> Run:
        ours = info.made_by_llmserve is not None
        warmup, requests = make_schedule(load, self.prompts, counter, ignore_eos=ours)
        whole = LoadShare(
            target.url, target.model, target.api, ours, load, warmup, requests, len(requests)
        )
        shares = whole.split(load.processes)
        with closing(Observer(target)) as observer, LoadGenerator(shares) as generator:

            def on_progress(done: int, seconds: float) -> None:
                self.on_progress(done, seconds)
                observer.sample()

            cold = observer.statistics()
            generator.warm_up()
            before = observer.settled(cold, len(warmup))
            start, reports = generator.run(on_progress)
            records, seconds = window(reports, load)
            after = observer.settled(before, sum(len(report.records) for report in reports))
            server = observer.figures(before, after, start, start + seconds)
        return Run(
            seconds=seconds,
            records=tuple(records),
            server=server,
            generator=cost_of(reports),
            interrupted=any(report.interrupted for report in reports),
            ended_early=next((r.given_up for r in reports if r.given_up is not None), None),
        )


def _check_that_all_see(infos: Sequence[ModelInfo]) -> None:
    """Refuse models that have no input for images; an OpenAI endpoint does not say."""
    for info in infos:
        if info.inputs and not info.input_of(contract.IMAGE_URL.name):
            raise UsageError(f"{info.name} reads only text", hint="leave out --image")


def bench(target: Target, load: Load, plan: Plan, tools: Sequence[str] = ()) -> Result:
    """Measure a model, also with other tools; a tool that fails only adds a note."""
    started, info, counter = now(), target.info(), target.counter()
    load = plan.fit(load, [info], counter)
    plan.on_step(f"measuring {target.model}, {load.label}")
    run = plan.run(target, info, load, counter)
    tool_figures, problems = [], []
    if tools and run.good and not run.interrupted and not run.ended_early:
        # The tools cannot share our clock, so they get as many requests as we sent.
        same, ours = replace(load, requests=len(run.records), duration=None), info.made_by_llmserve
        _, requests = make_schedule(same, plan.prompts, counter, ignore_eos=ours is not None)
        for name in tools:
            plan.on_step(f"measuring {target.model} with {name}")
            try:
                tool_figures.append(TOOLS[name].measure(target, info, same, requests))
            except LLMServeError as error:
                problems.append(str(error))
    case = Case(target.subject, load, (replace(run, tools=tuple(tool_figures)),))
    ends = run.interrupted, run.ended_early, tuple(problems)
    return Result("bench", case.subject.name, started, 1, machine(), (case,), *ends)


def compare(
    targets: Sequence[Target],
    loads: Sequence[Load],
    plan: Plan,
    *,
    rounds: int,
    answers: bool = False,
) -> Result:
    """Measure every model under every load; if the server dies, keep what was measured.

    With ``answers``, also compare what they answer.
    """
    started, infos = now(), [target.info() for target in targets]
    # One tokenizer for all, so that every model gets the same prompts.
    counter = targets[0].counter()
    plan = replace(plan, counter=counter, stream=plan.fit(loads[0], infos, counter).stream)
    by_name = {target.subject.name: target for target in targets}
    lost, problems = plan.losses(targets, counter) if answers else ((), [])
    cases = [Case(target.subject, load) for load in loads for target in targets]
    cases, interrupted = measure_rounds(cases, by_name, plan, rounds)
    failure = next((f"{c.name}, {c.why}" for c in cases if c.state == "failed"), None)
    if not any(case.runs for case in cases):
        raise LLMServeError(failure or "interrupted before a run was complete")
    title = " against ".join(by_name)
    ends = interrupted, failure, tuple(problems), lost
    return Result("compare", title, started, rounds, machine(), tuple(cases), *ends)


def sweep(
    cases: Sequence[Case], variants: Mapping[str, Variant], model: str, plan: Plan,
    registry: Registry, *, rounds: int,
) -> Result:  # fmt: skip
    """Build, serve and measure one variant after the other.

    A variant that cannot be built or served fails without affecting the others.
    """
    started, measured, interrupted = now(), [], False
    for variant in variants.values():
        variant.check(model, registry)
    for label, variant in variants.items():
        group = [case for case in cases if case.subject.name == label]
        try:
            if not interrupted:
                with serving([variant], model, registry, plan.on_step) as (target,):
                    group, interrupted = measure_rounds(group, {label: target}, plan, rounds)
        except LLMServeError as error:
            group = [replace(case, state="failed", why=str(error)) for case in group]
        except KeyboardInterrupt:
            interrupted = True
        measured += [c if c.runs or c.why else replace(c, state="not run") for c in group]
    title = f"{next(iter(variants.values())).plugin} of {model}"
    return Result("sweep", title, started, rounds, machine(), tuple(measured), interrupted)


def measure_rounds(
    cases: Sequence[Case], targets: Mapping[str, Target], plan: Plan, rounds: int
) -> tuple[list[Case], bool]:
    """Measure every case once in each round; also return whether Ctrl-C ended it.

    In a round all get the same prompts, lengths and arrival times. The cases of one load run one
    after the other in a new random order, so that drift of the machine affects all of them alike.
    """
    measured = list(cases)
    loads = list(dict.fromkeys(case.load.label for case in cases))
    try:
        for turn in range(rounds):
            draw = random.Random(f"order {measured[0].load.seed} {turn}")  # noqa: S311
            order = draw.sample(range(len(measured)), len(measured))
            for at in sorted(order, key=lambda at: loads.index(measured[at].load.label)):
                case, target = measured[at], targets[measured[at].subject.name]
                if case.state == "done":
                    step = f"round {turn + 1} of {rounds}: {case.name}, {case.load.label}"
                    plan.on_step(step)
                    measured[at] = _measure_case(case, target, plan, turn, step)
    except KeyboardInterrupt:
        return measured, True
    return measured, False


def _measure_case(case: Case, target: Target, plan: Plan, turn: int, step: str) -> Case:
    try:
        info, counter = target.info(), plan.counter or target.counter()
        load = plan.fit(case.load, [info], counter)
        run = plan.run(target, info, replace(load, seed=load.seed + turn), counter)
    except LLMServeError as error:
        return replace(case, state="failed", why=f"{step}: {error}")
    if run.interrupted:
        raise KeyboardInterrupt
    # A run that was cut short has fewer requests and a different mix: it is not comparable.
    if run.ended_early is not None:
        return replace(case, state="failed", why=f"{step}: {run.ended_early}")
    case = replace(case, subject=target.subject, load=load, runs=(*case.runs, run))
    if not run.good:
        why = f"every request failed: {run.records[0].message if run.records else ''}"
        case = replace(case, state="failed", why=why)
    return case


def make_cases(
    plugin: str, model: str, varied: dict[str, list[str]], common: Mapping[str, str], load: Load
) -> tuple[list[Case], dict[str, Variant]]:
    cases, variants = [], {}
    for values in product(*varied.values()):
        settings = dict(zip(varied, values, strict=True))
        build = {key: value for key, value in settings.items() if key not in LOADS}
        label = " ".join(f"{key}={value}" for key, value in build.items()) or plugin
        variants[label] = Variant(label, plugin, {**common, **build})
        described = {"plugin": plugin, "model": model, **common, **build}
        subject = Subject(label, variants[label].name, "", described)
        for key in settings.keys() & LOADS.keys():
            load = replace(load, **{"concurrency": None, key: LOADS[key](settings[key])})
        cases.append(Case(subject, load, varied=settings))
    return cases, variants


def parse_varied(texts: Iterable[str]) -> dict[str, list[str]]:
    """Parse the ``KEY=VALUE,VALUE`` of every ``--vary``."""
    varied: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        parts = list(dict.fromkeys(part.strip() for part in values.split(",") if part.strip()))
        if not (key and equals and parts):
            raise UsageError(f"{text!r} varies nothing", hint="write KEY=VALUE,VALUE")
        if key in varied:
            raise UsageError(f"{key} is varied twice", hint="give all its values in one --vary")
        varied[key] = parts
    loads = varied.keys() & LOADS.keys()
    if len(loads) > 1:
        raise UsageError("concurrency and rate cannot both be varied", hint="leave out one")
    for name, value in ((key, value) for key in loads for value in varied[key]):
        digits = value.replace(".", "", 1) if name == "rate" else value
        if not (digits.isdecimal() and int(digits) > 0):
            raise UsageError(f"{name} cannot be {value}", hint="give numbers above 0")
    return varied


def window(reports: Sequence[Report], load: Load) -> tuple[list[Record], float]:
    """Return the requests that count, and the seconds of the run.

    With a duration, a closed loop ends exactly then; otherwise the last answer ends the run. If the
    server died, the last good answer ends it: requests sent after that are not part of the load.
    """
    records = sorted((r for report in reports for r in report.records), key=lambda r: r.index)
    until = max(report.seconds for report in reports)
    if any(report.given_up for report in reports):
        last = max((record.done for record in records if record.error is None), default=until)
        return [record for record in records if record.sent <= last], last
    if load.duration is not None and load.concurrency is not None:
        seconds = min(load.duration, until)
    elif any(report.interrupted for report in reports):
        seconds = until
    else:
        seconds = max((record.done for record in records), default=until)
    return [record for record in records if record.done <= seconds], seconds


def machine() -> dict[str, str]:
    """Describe this machine; unknown properties are left out."""
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    properties = {
        "cores": str(os.cpu_count()),
        "cpu": _field("model name", Path("/proc/cpuinfo")),
        "gpu": " and ".join(_field("Model", path) for path in gpus),
        "python": platform.python_version(),
        "llmserve": __version__,
    }
    return {key: value for key, value in properties.items() if value}


def _field(key: str, path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    match = re.search(rf"^{key}\s*:\s*(.*)$", text, re.MULTILINE)
    return " ".join(match[1].split()) if match else ""


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
