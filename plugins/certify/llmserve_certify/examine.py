"""What a program needs that examines a server, and the author of a check.

A plugin adds checks with the hook ``llmserve_register_checks``, which only ``certify`` calls::

    from llmserve.plugin import Check, hookimpl

    def greets(exam: Examination) -> None:
        ask = exam.greedy("Hello", 8)
        if not exam.ask(ask).text:
            raise Broken("it does not greet", expected="words", got="", ask=ask)
"""

from __future__ import annotations

from llmserve_certify.endpoint import Ask, Gone, Refusal, Reply, Subject
from llmserve_certify.examination import Budget, Examination
from llmserve_certify.outcome import Broken, NotOffered, Undecided
from llmserve_certify.reference import Reference
from llmserve_certify.run import Report, all_checks, run_checks
from llmserve_certify.verdict import Verdict

__all__ = [
    "Ask",
    "Broken",
    "Budget",
    "Examination",
    "Gone",
    "NotOffered",
    "Reference",
    "Refusal",
    "Reply",
    "Report",
    "Subject",
    "Undecided",
    "Verdict",
    "all_checks",
    "run_checks",
]
