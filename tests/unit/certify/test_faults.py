"""Servers with one fault each: the right check names it, and a right server has none."""

from __future__ import annotations

import pytest

from llmserve.certify import Examination, Report, run_checks
from llmserve.certify.checks import CHECKS
from llmserve.certify.openai import OpenAIEndpoint
from tests.toy_server import FAULTS, ToyModel, ToyServer


def examined(fault: str = "", *, reference: bool = True, **options: object) -> Report:
    with ToyServer(fault).serving() as url:
        model = ToyModel() if reference else None
        endpoint = OpenAIEndpoint(url, "toy")
        exam = Examination(endpoint, model, precision="float32", **options)  # type: ignore[arg-type]
        return run_checks(exam, CHECKS)


@pytest.mark.parametrize(("fault", "check"), FAULTS.items())
def test_a_fault_is_named(fault: str, check: str) -> None:
    report = examined(fault)
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
