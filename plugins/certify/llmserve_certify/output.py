"""A report as JSON, as JUnit's XML, and what has changed since an earlier one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import quoteattr

from llmserve.errors import ConfigError, UsageError
from llmserve_certify.run import Report
from llmserve_certify.verdict import Verdict

_FORMAT = 1


class Change(NamedTuple):
    """A check whose verdict is another one than before; ``None`` for a check that was not run."""

    name: str
    before: str | None
    after: str | None
    is_worse: bool
    """Whether it is a fault now; one that follows from another is no worse than that."""


def as_json(report: Report) -> str:
    return writable(json.dumps(report.as_json(), indent=2, ensure_ascii=False, default=str))


def writable(text: str) -> str:
    """Return a text as a file can have it: a server may send halves of characters."""
    return text.encode("utf-8", "backslashreplace").decode()


def read_states(path: Path) -> dict[str, str]:
    """Return the state of each check in an earlier report."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ConfigError(f"{path} is of another llmserve", hint="make the baseline anew")
        return {verdict["name"]: verdict["state"] for verdict in content["verdicts"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        hint = "give a file that `llmserve certify --json` wrote"
        raise UsageError(f"{path} is no report: {error}", hint=hint) from None


def changes(before: dict[str, str], report: Report) -> list[Change]:
    """Return what has changed; that a check is not finished says nothing of the server."""

    def is_worse(verdict: Verdict) -> bool:
        """Whether it is a fault, or follows from one that it did not follow from before."""
        is_known = before.get(verdict.cause) == "failed"
        return verdict.is_fault or (verdict.state == "failed" and is_known)

    found = [Change(v.name, before.get(v.name), v.state, is_worse(v)) for v in report.verdicts]
    known = {verdict.name for verdict in report.verdicts}
    found += [
        Change(name, state, None, False) for name, state in before.items() if name not in known
    ]
    return [c for c in found if c.before != c.after and c.after != "unfinished"]


def change_lines(changed: Sequence[Change]) -> list[tuple[str, str]]:
    """Return what to say of changes: a name, and what has become of it.

    What is run in one of the two only, as with ``--quick``, is no change of the server.
    """
    lines = [
        (change.name, f"was {change.before or 'not run'}, now {change.after}")
        for change in changed
        if change.after == "failed" or (change.before and change.after)
    ]
    alone = {name for name, _ in lines}
    for words, others in (
        ("were not run this time", [c for c in changed if c.after is None]),
        ("were not run before", [c for c in changed if c.before is None and c.name not in alone]),
    ):
        if others:
            lines.append((f"{len(others)} checks", words))
    return lines or [("nothing", "has changed")]


def as_junit(report: Report) -> str:
    """Return a test suite with a case for each check."""
    counted = report.counted()
    name = f"{report.subject['model']} at {report.subject['at']}"
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        f'<testsuite name={_attribute(f"llmserve certify {name}")} tests="{len(report.verdicts)}" '
        f'failures="{counted["failed"]}" errors="{counted["unfinished"]}" '
        f'skipped="{counted["skipped"] + counted["undecided"]}" '
        f'time="{report.seconds}" timestamp={_attribute(report.date)}>',
        *(line for verdict in report.verdicts for line in _case(verdict)),
        "</testsuite>",
    ]
    return "\n".join(lines) + "\n"


def _case(verdict: Verdict) -> Sequence[str]:
    head = f'  <testcase classname="{verdict.severity}" name={_attribute(verdict.name)}'
    head += f' time="{verdict.seconds}"'
    if verdict.state == "passed":
        return [f"{head}/>"]
    message = _attribute(verdict.words)
    if verdict.state == "failed":
        details = _text("\n".join(line for line in evidence(verdict)))
        return [f"{head}>", f"    <failure message={message}>{details}</failure>", "  </testcase>"]
    kind = "error" if verdict.state == "unfinished" else "skipped"
    return [f"{head}>", f"    <{kind} message={message}/>", "  </testcase>"]


def evidence(verdict: Verdict) -> list[str]:
    """Return what shows a failure, a line each."""
    lines = [f"{verdict.meaning}."]
    if verdict.cause:
        lines.append(f"probably because {verdict.cause} fails")
    if verdict.expected is not None:
        lines.append(f"expected: {verdict.expected!r}")
    if verdict.got is not None:
        lines.append(f"got:      {verdict.got!r}")
    if verdict.curl:
        lines.append(f"repeat:   {verdict.curl}")
    return lines


def _printable(text: str) -> str:
    # XML has no way to write most control characters.
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _attribute(value: Any) -> str:
    return quoteattr(_printable(str(value)))


def _text(value: str) -> str:
    from xml.sax.saxutils import escape

    return escape(_printable(value))
