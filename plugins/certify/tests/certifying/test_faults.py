"""Servers with one fault each: the right check names it, and a right server has none."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import pytest

from llmserve.plugin import Check
from llmserve_certify.checks import CHECKS, images
from llmserve_certify.endpoint import Ask, Refusal, Reply
from llmserve_certify.examine import Examination, Report, run_checks
from llmserve_certify.openai import OpenAIEndpoint

from .toy_server import FAULTS, ROUNDING, ToyModel, ToyServer


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


def examined(
    fault: str = "",
    *,
    reference: bool = True,
    precision: str = "float32",
    checks: Sequence[Check] = CHECKS,
    **options: object,
) -> Report:
    server = ToyServer(fault, 0.0 if precision == "float32" else ROUNDING)
    with server.serving() as url:
        model = ToyModel(precision) if reference else None
        endpoint = OpenAIEndpoint(url, "toy")
        exam = ToyExamination(endpoint, model, precision=precision, **options)  # type: ignore[arg-type]
        exam.server = server
        report = run_checks(exam, checks)
    assert not [verdict for verdict in report.verdicts if "check ends with" in verdict.words]
    return report


SLOW = (
    "order-changed-once-in-fifty", "bad-words-ignored", "order-of-images-lost",
    "bad-images-accepted",
)  # fmt: skip
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


IMAGES = [check for check in CHECKS if check in images.CHECKS]


def test_images_of_a_model_of_text_are_skipped() -> None:
    report = examined("images-refused", checks=IMAGES)
    assert {verdict.state for verdict in report.verdicts} == {"skipped"}
    assert report.verdicts[0].words == "images are refused: this model reads only text"


def test_an_image_that_is_cut_off_is_refused_by_who_looks_into_it_alone() -> None:
    """Not by who looks only whether it is base64, of which another image is none."""
    cut_off = images._BAD["an image that is cut off"].partition(",")[2]
    content = base64.b64decode(cut_off, validate=True)
    assert content.startswith(b"\x89PNG")
    assert b"IDAT" in content
    assert b"IEND" not in content


SEEDS = [check for check in CHECKS if check.name in ("repeatable", "same-in-a-batch", "seed")]


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("fault", ["", "seed-dropped", "seed-dropped-beside-others"])
def test_rounding_is_told_from_a_seed_that_is_not_kept(fault: str, reference: bool) -> None:
    report = examined(fault, reference=reference, precision="bfloat16", checks=SEEDS)
    states = {verdict.name: verdict for verdict in report.verdicts}
    assert states["seed"].state == ("failed" if fault else "passed"), states["seed"].words
    if not fault:
        assert "first tokens differ" in states["seed"].notes[0]
