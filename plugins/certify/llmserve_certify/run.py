"""Runs checks against an endpoint, and judges which failure explains which."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, get_args

from llmserve import __version__
from llmserve.client import OpenAIApi
from llmserve.errors import PluginError, RequestRejectedError, UnreachableError, UsageError
from llmserve.plugin import Check, Registry, Severity
from llmserve.runtime.contract import GENERATE
from llmserve_certify.checks import CHECKS
from llmserve_certify.checks.answers import find_echo, find_refused
from llmserve_certify.endpoint import Gone, Malformed, Refusal
from llmserve_certify.examination import Examination
from llmserve_certify.outcome import Broken, NotOffered, Outcome, OutOfBudget
from llmserve_certify.verdict import State, Verdict

OnVerdict = Callable[[Verdict], None]
_LONGEST = 600
_WAITS = (0.0, 1.0, 3.0, 6.0)
"""Seconds before each try to reach a server that gives no answer: it may be starting anew."""
_PATIENCE = 10.0
_HINTS = {
    401: f"set {OpenAIApi.key_variable}",
    403: f"set {OpenAIApi.key_variable}",
    404: "see the address, and the model's name",
    **dict.fromkeys((429, 503), "try again when it has time"),
}
"""What to do about a status of the first request."""


@dataclass(frozen=True)
class Report:
    """What was examined, against what, and what came of it."""

    subject: Mapping[str, str]
    against: Mapping[str, str] | None
    precision: str
    verdicts: tuple[Verdict, ...]
    requests: int
    seconds: float
    quick: bool = False
    date: str = ""
    version: str = __version__
    margin: float | None = None
    unit: str = "logits"
    """What the margin is a number of."""
    format: int = field(default=1)

    @property
    def faults(self) -> list[Verdict]:
        """The failures that no other failure explains, the worst first."""
        order = get_args(Severity)
        found = [verdict for verdict in self.verdicts if verdict.is_fault]
        return sorted(found, key=lambda verdict: order.index(verdict.severity))

    def counted(self) -> dict[str, int]:
        return {state: sum(v.state == state for v in self.verdicts) for state in get_args(State)}

    @property
    def is_finished(self) -> bool:
        """Whether something was decided, and the budget cut nothing off."""
        counted = self.counted()
        return not counted["unfinished"] and counted["passed"] + counted["failed"] > 0

    @property
    def title(self) -> str:
        if self.faults:
            return "faults"
        return "certified" if self.is_finished else "not finished"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def all_checks(registry: Registry) -> list[Check]:
    """Return our checks, and those of plugins."""
    checks = list(CHECKS)
    for plugin, function in registry.implementations("llmserve_register_checks"):
        for check in function():
            if not isinstance(check, Check):
                raise PluginError(f"plugin {plugin} registers {check!r}, which is no Check")
            if any(check.name == other.name for other in checks):
                raise PluginError(f"plugin {plugin} registers a second check {check.name!r}")
            checks.append(check)
    return checks


def run_checks(
    exam: Examination,
    checks: Sequence[Check],
    *,
    on_start: Callable[[Check], None] = lambda _: None,
    on_verdict: OnVerdict = lambda _: None,
) -> Report:
    """Run every check that the endpoint and the reference allow."""
    began = time.monotonic()
    verdicts: list[Verdict] = []
    chosen = checks_for(exam, checks)
    _begin(exam)
    # Not at the end, when the time may be over or the server be gone.
    described = _described(exam)
    gone_since = ""
    for check in chosen:
        on_start(check)
        verdict = _unasked(check, gone_since) if gone_since else run_check(exam, check)
        if verdict.state == "failed" and exam.lost and not gone_since and _is_gone(exam):
            gone_since = check.name
        verdict = replace(verdict, cause=_cause(verdict, check, verdicts))
        verdicts.append(verdict)
        on_verdict(verdict)
    by_name = {check.name: check for check in chosen}
    verdicts = [replace(v, cause=_cause(v, by_name[v.name], verdicts)) for v in verdicts]
    endpoint, reference = exam.endpoint, exam.reference or exam.encoder
    subject = {"model": endpoint.model, "at": endpoint.url, "api": endpoint.kind}
    unit = "logits" if endpoint.task == GENERATE else "of the length of a vector"
    return Report(
        {**subject, **described},
        {"model": reference.name, **reference.describe()} if reference else None,
        exam.precision,
        tuple(verdicts),
        exam.asked,
        round(time.monotonic() - began, 1),
        exam.quick,
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        margin=exam.known_margin,
        unit=unit,
    )


def checks_for(exam: Examination, checks: Sequence[Check]) -> list[Check]:
    """Return those that are about what the endpoint does, and that ``--quick`` leaves."""
    task = "generate" if exam.endpoint.task == GENERATE else "values"
    return [check for check in checks if check.task == task and (check.quick or not exam.quick)]


def _begin(exam: Examination) -> None:
    """See that there is a server to examine."""
    try:
        # This also loads what the server loads late, and takes none of a check's time.
        if exam.endpoint.task == GENERATE:
            exam.try_ask(exam.greedy(exam.prompts[0], 1))
            find_refused(exam)
            find_echo(exam)
        else:
            exam.try_values(exam.prompts[:1])
    except OutOfBudget as error:
        raise UsageError(error.words, hint="allow more (--budget)") from None
    except Refusal as error:
        hint = _HINTS.get(error.status, "if it needs an option, give it with --set")
        raise RequestRejectedError(
            f"the server refuses the first request: {error.words}", hint=hint
        ) from None
    except Malformed as error:
        hint = "see whether this is the address of such a server"
        raise UnreachableError(error.problem, hint=hint) from None
    except Gone as error:
        raise UnreachableError(error.problem, hint="see whether it runs") from None
    except Broken as error:
        raise RequestRejectedError(f"the server refuses a plain request: {error.words}") from None


def _described(exam: Examination) -> dict[str, str]:
    try:
        return exam.in_time(exam.endpoint.describe)
    except (Outcome, Refusal, Gone):
        return {}


def _is_gone(exam: Examination) -> bool:
    """Whether the server has ended, and does not come back soon."""
    began = time.monotonic()
    for wait in _WAITS:
        if time.monotonic() - began > _PATIENCE:
            # It takes the requests, and answers none.
            break
        try:
            exam.pause(wait)
            if exam.endpoint.task == GENERATE:
                exam.try_ask(exam.greedy(exam.prompts[0], 1))
            else:
                exam.try_values(exam.prompts[:1])
        except Malformed:
            return False
        except (Gone, Refusal) as error:
            if isinstance(error, Gone) or error.is_about_server:
                continue
            return False
        except Outcome:
            return False
        return False
    return True


def _unasked(check: Check, since: str) -> Verdict:
    words = f"the server no longer answers, since {since}"
    return Verdict(check.name, "unfinished", check.severity, check.promise, check.meaning, words)


def run_check(exam: Examination, check: Check) -> Verdict:
    began, asked = time.monotonic(), exam.asked
    exam.notes, exam.figures, exam.lost = [], {}, False
    state: State = "passed"
    words, expected, got = "", None, None
    broken: Broken | Refusal | Gone | None = None
    try:
        if missing := next(_missing(exam, check), ""):
            raise NotOffered(missing)
        check.run(exam)
    except Broken as error:
        state, words = "failed", error.words
        expected, got, broken = _shown(error.expected), _shown(error.got), error
    except NotOffered as error:
        state, words = "skipped", error.words
    except OutOfBudget as error:
        state, words = "unfinished", error.words
    except Outcome as error:
        state, words = "undecided", error.words
    except (Refusal, Gone) as error:
        state, words, broken = "failed", f"a request fails: {error.problem}", error
        got = _shown(error.got if isinstance(error, Gone) else error.words)
    except Exception as error:
        # The other checks' verdicts must not be lost by a mistake in one, perhaps a plugin's; but
        # nothing is certified by it either, since what a server sent may have led to it.
        state, words = "unfinished", f"the check ends with {type(error).__name__}: {error}"
    return Verdict(
        check.name,
        state,
        check.severity,
        check.promise,
        check.meaning,
        " ".join(words.split()),
        expected,
        got,
        _repeated(exam, broken) if broken else "",
        tuple(exam.notes),
        dict(exam.figures),
        requests=exam.asked - asked,
        seconds=round(time.monotonic() - began, 2),
    )


def _repeated(exam: Examination, broken: Broken | Refusal | Gone) -> str:
    """Return the command line that repeats a failure; that there is none must not hide it."""
    if isinstance(broken, Broken) and broken.curl:
        return broken.curl
    try:
        return exam.endpoint.curl(broken.ask) if broken.ask else ""
    except Exception as error:
        exam.note(f"no command line can be written of the request: {type(error).__name__}")
        return ""


def _missing(exam: Examination, check: Check) -> Iterator[str]:
    known = exam.reference if check.task == "generate" else exam.encoder
    if "reference" in check.needs and known is None:
        yield "it needs the model: --against"
    if "chat" in check.needs and not exam.endpoint.chats:
        yield "the server takes no chats"
    if "chat" in check.needs and exam.reference and not exam.reference.chats:
        yield "the model has no chat template"
    if "stream" in check.needs and not exam.endpoint.streams:
        yield "the server does not stream"


def _cause(verdict: Verdict, check: Check, verdicts: Sequence[Verdict]) -> str:
    if verdict.state != "failed":
        return ""
    failed = {other.name for other in verdicts if other.state == "failed"}
    return next((name for name in check.follows if name in failed), "")


def _shown(value: object) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"
