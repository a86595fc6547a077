"""Under which conditions a measurement holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.measure.runs import Load, Run, Subject
from llmserve.report.page import Table
from llmserve.report.words import NONE, clean, counted, listed, seconds, tick

Fact = tuple[str, str]
_PLAIN = ("cpu", "gpu", "architecture", "system")


def conditions(runs: Sequence[Run], loads: Sequence[Load]) -> list[Fact]:
    """Say what holds for all runs: the prompts, how they were asked, and on what machine."""
    if not runs:
        return []
    load = loads[0]
    facts = [
        ("Load", "; ".join(loads_in_words(loads))),
        ("Prompts", _joined(run.load.dataset for run in runs)),
        ("Options of each request", settings(load.options) or "none"),
        ("Answers", _answers(runs)),
    ]
    limits = [
        f"{what} {seconds(limit)}"
        for what, limit in (
            ("latency", load.limit_latency),
            ("time to first token", load.limit_ttft),
        )
        if limit is not None
    ]
    if limits:
        facts.append(("Limits of goodput", ", ".join(limits)))
    facts += machine(runs)
    facts.append(("Seed of the prompts", _joined(run.load.seed for run in runs)))
    return facts


def _answers(runs: Sequence[Run]) -> str:
    # By what came: a model that cannot stream answers in one piece whatever it is asked.
    streamed = {
        clean(run.subject.name)
        for run in runs
        if any(len(record.pieces) > 1 for record in run.records)
    }
    whole = [name for name in _names(runs) if name not in streamed]
    if not whole or not streamed:
        return "in one piece" if whole else "streamed"
    some = [name for name in _names(runs) if name in streamed]
    return f"streamed by {listed(some[:3])}, in one piece by {listed(whole[:3])}"


def _names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(clean(run.subject.name) for run in runs))


def model_of(subject: Subject) -> str:
    """Name the model that was built, else the one that was asked."""
    return model_name(subject.build.get("model", subject.model))


def model_name(source: object) -> str:
    """Shorten a folder to its name: where it lay says nothing to who reads.

    >>> model_name("/home/me/models/gpt2"), model_name("openai-community/gpt2")
    ('gpt2', 'openai-community/gpt2')
    """
    text = clean(source)
    return text.rstrip("/").rpartition("/")[2] if text.startswith(("/", "./", "../")) else text


def machine(runs: Sequence[Run]) -> list[Fact]:
    """Say what the measurement ran on."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for key, value in run.machine.items():
            known = found.setdefault(clean(key), [])
            if (text := clean(value)) not in known:
                known.append(text)
    text = ", ".join(_part(key, " or ".join(values)) for key, values in found.items())
    servers = _joined(run.subject.server for run in runs if run.subject.server)
    return [("Machine", text or "not told"), *([("Server", servers)] if servers else [])]


def _part(key: str, value: str) -> str:
    if key in _PLAIN:
        return value
    named = {"cores": f"{value} cores", "python": f"Python {value}"}
    return named.get(key, f"{key} {value}")


def loads_in_words(loads: Sequence[Load]) -> list[str]:
    """Say how subjects were asked, in one line for loads that differ only in how many.

    >>> from dataclasses import replace
    >>> load = Load(8, None, None, 98, None, 4, True, 0, "made up")
    >>> loads_in_words([load, replace(load, concurrency=16)])
    ['8 and 16 requests under way at all times, 98 requests in all, after 4 to warm up']
    """
    alike: dict[str, list[str]] = {}
    as_many = len(loads) > 1 and all(load.warmup == load.concurrency for load in loads)
    for load in loads:
        many = str(load.concurrency) if load.concurrency is not None else tick(load.rate or 0.0)
        alike.setdefault(_rest(load, as_many=as_many), []).append(many)
    return [
        f"{listed(list(dict.fromkeys(many)))} {'request' if many == ['1'] else 'requests'} {rest}"
        for rest, many in alike.items()
    ]


def _rest(load: Load, *, as_many: bool) -> str:
    if load.concurrency is not None:
        parts = ["under way at all times"]
    else:
        kind = clean(load.arrivals or "poisson").capitalize()
        parts = [f"sent per second, {kind} arrivals"]
    if load.requests is not None:
        parts.append(f"{counted(load.requests, 'request')} in all")
    if load.duration is not None:
        parts.append(f"for {seconds(load.duration)}")
    if load.warmup:
        many = "as many" if as_many else f"{load.warmup:,}"
        parts.append(f"after {many} to warm up")
    return ", ".join(parts)


def subjects(found: Sequence[Subject]) -> Table:
    """List what was measured."""
    names = {"unary": "in one piece", "stream": "as a stream", "sequence": "as a sequence"}
    rows = tuple(
        (clean(subject.name), clean(subject.model), settings(subject.build) or NONE,
         names.get(subject.exchange, clean(subject.exchange)), clean(subject.url))
        for subject in found
    )  # fmt: skip
    columns = ("", "model", "built with", "asked", "at")
    return Table("What was measured", columns, rows, frozenset(range(5)))


def settings(given: Mapping[str, Any]) -> str:
    """Write settings in their order.

    >>> settings({"batching": "static", "stream": True})
    'batching static, stream true'
    """
    return ", ".join(
        f"{clean(key)} {model_name(value) if key == 'model' else value_of(value)}"
        for key, value in given.items()
    )


def value_of(value: Any) -> str:
    """Write one value as it would be typed."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return " ".join(value_of(part) for part in value)
    return clean(value)


def _joined(values: Any) -> str:
    found = list(dict.fromkeys(clean(value) for value in values))
    return listed(found) if found else ""
