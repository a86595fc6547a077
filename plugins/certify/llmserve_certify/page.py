"""A report as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from llmserve_certify.output import Change, change_lines, writable
from llmserve_certify.run import Report
from llmserve_certify.verdict import Verdict

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 68rem; padding: 0 1rem;
  color: #1c1f23; background: #fff; }
h1 { font-size: 1.5rem; margin-bottom: 0; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
p.result { font-size: 1.1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem;
  border-bottom: 1px solid #d9dde2; }
td.state { font-weight: 600; white-space: nowrap; }
.passed { color: #14691b; } .failed { color: #b3140c; } .undecided, .unfinished { color: #8a5700; }
.skipped { color: #5d6670; }
.facts td:first-child { width: 10rem; color: #5d6670; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f3f5f7; padding: .5rem;
  margin: .3rem 0; font-size: 13px; }
small { color: #5d6670; }
@media (prefers-color-scheme: dark) {
  body { color: #e4e7ea; background: #16191c; } pre { background: #22262b; }
  th, td { border-color: #3a4047; } .passed { color: #6fca78; } .failed { color: #ff8a80; }
  .undecided, .unfinished { color: #e8b14b; }
  .skipped, small, .facts td:first-child { color: #a3abb3; } }
"""


def page(report: Report, changed: Sequence[Change] | None = None) -> str:
    title = f"{escape(report.subject['model'])}: {report.title}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(report.subject['model'])}</h1>",
        f'<p class="result">{escape(result(report))}</p>',
        "<h2>What was checked</h2>",
        _facts(report.subject.items()),
        "<h2>Against what</h2>",
        _against(report),
        *_changed(changed),
        "<h2>Checks</h2>",
        "<table><thead><tr><th>result</th><th>check</th><th>severity</th><th>promise</th></tr>"
        "</thead><tbody>",
        *(_row(verdict) for verdict in report.verdicts),
        "</tbody></table>",
        f"<p><small>{report.requests} requests in {report.seconds} s, {escape(report.date)}, "
        f"llmserve {escape(report.version)}{', --quick' if report.quick else ''}</small></p>",
        "</body></html>",
    ]
    return writable("\n".join(parts) + "\n")


def result(report: Report) -> str:
    """Say in one line what came of it."""
    counted = report.counted()
    others = ("undecided", "skipped", "unfinished")
    rest = [f"{counted[state]} {state}" for state in others if counted[state]]
    tail = f", {', '.join(rest)}" if rest else ""
    if not report.faults:
        head = "" if report.is_finished else "not finished: "
        return f"{head}{counted['passed']} checks passed, none failed{tail}"
    names = ", ".join(verdict.name for verdict in report.faults)
    return f"{counted['failed']} checks failed, {counted['passed']} passed{tail}: {names}"


def _facts(facts: Iterable[tuple[str, Any]]) -> str:
    rows = [f"<tr><td>{escape(k)}</td><td>{escape(str(v))}</td></tr>" for k, v in facts]
    return f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>'


def _against(report: Report) -> str:
    if report.against is None:
        return "<p>Itself: no model was given to compare with (<code>--against</code>).</p>"
    facts = {**report.against, "precision": report.precision}
    if report.margin is not None:
        facts["which explains"] = f"{report.margin:.3g} {report.unit}"
    return _facts(facts.items())


def _changed(changed: Sequence[Change] | None) -> list[str]:
    if changed is None:
        return []
    return ["<h2>Since the baseline</h2>", _facts(change_lines(changed))]


def _row(verdict: Verdict) -> str:
    details = [escape(verdict.promise)]
    if verdict.state == "failed":
        details.append(f"<br>{escape(verdict.meaning)}.")
    if verdict.words:
        details.append(f"<br><b>{escape(verdict.words)}</b>")
    if verdict.cause:
        details.append(f"<br>Probably because <i>{escape(verdict.cause)}</i> fails.")
    for label, value in (("expected", verdict.expected), ("got", verdict.got)):
        if value is not None:
            details.append(f"<pre>{label}: {escape(value)}</pre>")
    if verdict.curl:
        details.append(f"<pre>{escape(verdict.curl)}</pre>")
    if verdict.figures:
        figures = ", ".join(f"{name} {value}" for name, value in verdict.figures.items())
        details.append(f"<br><small>{escape(figures)}</small>")
    details += [f"<br><small>{escape(note)}</small>" for note in verdict.notes]
    return (
        f'<tr id="{escape(verdict.name)}"><td class="state {verdict.state}">{verdict.state}</td>'
        f"<td>{escape(verdict.name)}</td><td>{verdict.severity}</td><td>{''.join(details)}</td></tr>"
    )
