"""What a result says in tables and notes: the same for the terminal and the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from llmserve_bench.figures import FIGURES, Figure, Ranked, number, ranking, ratios_of, rounds_of
from llmserve_bench.results import Result, Run

_NUMBER = re.compile(r"[-\d.,]+( to [\d.,]+)?( \([\d., to]+\))?")
_BUSY = 0.8
_LATE = 0.005
_LATE_SHARE = 0.05
"""How late the generator may be, in seconds and of the time to a first token, without a note."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def is_text(self, column: int) -> bool:
        """Whether a column holds words, which stand on the left, and not numbers."""
        cells = [row[column] for row in self.rows if row[column]]
        return column == 0 or not all(_NUMBER.fullmatch(cell) for cell in cells)


def tables_of(result: Result) -> list[Table]:
    found = [_figures(result, load) for load in result.loads]
    if result.kind == "compare":
        found = [*(_ratios(result, load) for load in result.loads), *found]
    elif result.kind == "sweep":
        left = [case for case in result.cases if case.state != "done"]
        rows = [(case.name, case.state, case.why) for case in left]
        unfinished = Table("Not measured to the end", ("Variant", "state", "why"), rows)
        found = [_ranking(result), unfinished]
    return [table for table in [*found, _failures(result)] if table.rows]


def notes_of(result: Result) -> list[str]:
    found = ["interrupted: these are the figures until then"] if result.interrupted else []
    if result.ended_early:
        found.append(f"ended early: {result.ended_early}")
    found += result.problems
    for part in _distinct(part for case in result.cases for part in case.stand_ins):
        names = _distinct(case.subject.name for case in result.cases if part in case.stand_ins)
        found.append(
            f"{', '.join(names)}: a stand-in answered in place of {part}, whose speed is another"
        )
    found += [
        f"no request was done within {run.seconds:.3g} s: measure for longer"
        for run in result.runs
        if not run.records
    ]
    if any("estimated" in case.load.prompts for case in result.cases):
        found.append(
            "the model's tokenizer is not at hand, so prompts have only roughly the length "
            "wanted: name it with --repository or --tokenizer"
        )
    return found + _notes_on_generator(result.runs)


def _notes_on_generator(runs: Sequence[Run]) -> list[str]:
    """Say whether the load generator is to blame for a part of the figures."""
    busy = max((run.generator.busy for run in runs), default=0.0)
    if busy > _BUSY:
        return [
            f"the load generator used {busy:.0%} of a core and may have been the bottleneck: "
            "use more --processes"
        ]
    # Against what is measured: 50 ms are little in an answer of 10 s and much in one of 60 ms.
    late = [
        run.generator.late
        for run in runs
        if run.good
        and run.generator.late > max(_LATE, _LATE_SHARE * median(r.first_token for r in run.good))
    ]
    if not late:
        return []
    where = f" (in {len(late)} of {len(runs)} runs)" if len(runs) > 1 else ""
    return [
        f"the load generator was up to {max(late) * 1000:.0f} ms late{where}: the machine was "
        "busy, and times are uncertain by as much"
    ]


def conditions_of(result: Result) -> dict[str, str]:
    cases, machine, load = result.cases, result.machine, result.cases[0].load
    end = f"{load.requests} requests" if load.requests else f"{load.duration:g} s"
    arrivals = f"{load.arrivals} arrivals, " if load.rate else ""
    limits = {"latency": load.limit_latency, "first token": load.limit_ttft}
    cost = [run.generator.busy * 100 for run in result.runs] or [0.0]
    hardware = (machine.get("cpu"), f"{machine.get('cores')} cores", machine.get("gpu"))
    builds = (f"{c.subject.name}: {_settings(c.subject.build)}" for c in cases if c.subject.build)
    found = {
        "Load": f"{', '.join(result.loads)}; {arrivals}{end}, {load.warmup} to warm up",
        "Rounds": "" if result.kind == "bench" else str(result.rounds),
        "Prompts": "; ".join(_distinct(case.load.prompts for case in cases)),
        "Request options": _settings(load.options),
        "Answers": "streamed" if load.stream else "in one piece",
        "Limits": ", ".join(f"{name} {v * 1000:g} ms" for name, v in limits.items() if v),
        "Seed": str(load.seed),
        "Builds": "; ".join(_distinct(builds)),
        "Server": ", ".join(_distinct(case.subject.server or case.subject.url for case in cases)),
        "Machine": ", ".join(part for part in hardware if part),
        "Software": f"llmserve {machine.get('llmserve')}, Python {machine.get('python')}",
        "Load generator": f"{_range(cost)} % of a core, {load.processes} process(es)",
        "Started": result.started.replace("T", " ").replace("+00:00", " UTC"),
    }
    return {name: value for name, value in found.items() if value}


def throughput_figure(result: Result) -> Figure:
    """Give the figure that stands for throughput: tokens where a model counts them."""
    tokens = FIGURES["output_tokens_per_second"]
    counted = any(tokens in rounds_of(case) for case in result.cases)
    return tokens if counted else FIGURES["requests_per_second"]


def _figures(result: Result, load: str) -> Table:
    cases = [case for case in result.cases if case.load.label == load and case.runs]
    each = [rounds_of(case) for case in cases]
    tools = [tool for case in cases for run in case.runs for tool in run.tools]
    rows = []
    for figure in dict.fromkeys([*FIGURES.values(), *(one for found in each for one in found)]):
        cells = [_mean(figure, found.get(figure, ())) for found in each]
        if any(cells):
            others = [tool.figures.get(figure.name) for tool in tools]
            texts = ["" if value is None else figure.text(value) for value in others]
            rows.append([figure.title, *(cell or "-" for cell in cells), *texts])
    means = ": mean (lowest to highest)" if result.rounds > 1 else ""
    names = [*(case.name for case in cases), *(tool.tool for tool in tools)]
    return Table(f"Figures, {load}{means}", ["Figure", *names], rows)


def _mean(figure: Figure, values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = figure.text(min(values)), figure.text(max(values))
    mean = round(fmean(values)) if figure.unit == "count" else fmean(values)
    return low if low == high else f"{figure.text(mean)} ({low} to {high})"


def _ratios(result: Result, load: str) -> Table:
    rows = [
        (
            ratio.figure.label,
            ratio.name,
            number(ratio.ratio),
            f"{number(ratio.low)} to {number(ratio.high)}" if ratio.low > 0 else "-",
            ratio.verdict,
        )
        for ratio in ratios_of(result)
        if ratio.load == load
    ]
    first = result.cases[0].name
    columns = "Figure", "of", f"in multiples of {first}", "95 % interval", "difference"
    return Table(f"Compared with {first}, {load}", columns, rows)


def _ranking(result: Result) -> Table:
    rows = [
        (
            one.case.name,
            str(at),
            number(one.throughput),
            _range(one.rounds),
            number(one.p99 * 1000),
            _against_first(one, at),
        )
        for at, one in enumerate(ranking(result.cases), 1)
    ]
    rate = throughput_figure(result).label
    columns = "Variant", "rank", rate, "rounds", "P99 latency (ms)", "against the first"
    return Table("Ranking", columns, rows)


def _against_first(one: Ranked, at: int) -> str:
    if not one.within:
        return "over the limit"
    if at == 1:
        return "-"
    if len(one.rounds) < 2:
        return "one round, unclear"
    return "rounds overlap, unclear" if one.overlaps else "slower"


def _failures(result: Result) -> Table:
    rows = []
    for case in result.cases:
        records = [record for run in case.runs for record in run.records if record.error]
        for kind, count in Counter(record.error or "" for record in records).items():
            messages = Counter(record.message or "" for record in records if record.error == kind)
            rows.append((case.name, kind, str(count), messages.most_common(1)[0][0]))
    return Table("Failed requests", ("Of", "failure", "requests", "message"), rows)


def _settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _range(values: Sequence[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]
