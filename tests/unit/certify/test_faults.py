"""Servers with one fault each: the right check names it, and a right server has none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmserve.certify import Examination, Report, run_checks
from llmserve.certify.checks import CHECKS
from llmserve.certify.endpoint import Ask, Refusal, Reply
from llmserve.certify.openai import OpenAIEndpoint
from tests.toy_server import FAULTS, ToyModel, ToyServer


class ToyExamination(Examination):
    """Tells the server what comes at once, so that its batches do not depend on the machine."""

    server: ToyServer

    def together(
        self, asks: Sequence[Ask], *, delay: float = 0.0, most: int | None = None
    ) -> list[Reply]:
        with self.server.expecting(0 if delay else len(asks), most or self.concurrency):
            return super().together(asks, delay=delay, most=most)

    def gather(self, asks: Sequence[Ask]) -> list[Reply | Refusal]:
        with self.server.expecting(len(asks), self.concurrency):
            return super().gather(asks)


def examined(fault: str = "", *, reference: bool = True, **options: object) -> Report:
    server = ToyServer(fault)
    with server.serving() as url:
        model = ToyModel() if reference else None
        endpoint = OpenAIEndpoint(url, "toy")
        exam = ToyExamination(endpoint, model, precision="float32", **options)  # type: ignore[arg-type]
        exam.server = server
        report = run_checks(exam, CHECKS)
    assert not [verdict for verdict in report.verdicts if "check ends with" in verdict.words]
    return report


SLOW = ("order-changed-once-in-fifty", "bad-words-ignored")
"""They take checks or requests that --quick does not have."""


@pytest.mark.parametrize(("fault", "check"), FAULTS.items())
def test_a_fault_is_named(fault: str, check: str) -> None:
    report = examined(fault, quick=fault not in SLOW)
    assert [verdict.name for verdict in report.faults] == [check]
    verdict = report.faults[0]
    assert verdict.curl.startswith("curl -s")
    assert verdict.words


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("reference", [False, True])
def test_a_right_server_has_no_fault(quick: bool, reference: bool) -> None:
    report = examined(reference=reference, quick=quick)
    assert report.faults == []
    assert report.counted()["passed"] > (15 if reference else 10)
