"""What reports say of a server's time and batches, of one model and of an ensemble."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmserve.measure.results import ModelFigures, Run, ServerFigures
from llmserve.report import page
from llmserve.report.plots.server import server_time
from llmserve.report.within import every_share, shares, sizes
from tests.unit.report_examples import make_run

WHOLE = ModelFigures("gpt2", 98, 0, 98, 98, 9.8, 0.0, 0.0, 0.98, 0.0, {"1": 98})
READ = replace(WHOLE, model="gpt2_read", success=0.98, executions=98)
GRAPH = replace(WHOLE, model="gpt2_graph", inferences=800, executions=100, batches={"8": 100})


def ensemble() -> Run:
    return replace(make_run("static", requests=98), server=ServerFigures((WHOLE, READ, GRAPH)))


def test_of_an_ensembles_time_the_rest_is_told_too() -> None:
    (share,) = shares([("gpt2", ensemble())])
    assert share.parts() == pytest.approx([0.0, 0.0, 0.01, 0.0, 0.09])
    figure = server_time([share])
    assert figure is not None
    assert "90.0 ms elsewhere" in figure.alt
    # Of a model by itself Triton tells all there is.
    (plain,) = shares([("static", make_run("static"))])
    assert plain.parts()[-1] == 0.0
    figure = server_time([plain])
    assert figure is not None
    assert "elsewhere" not in figure.alt + figure.svg + figure.caption


def test_each_part_has_its_own() -> None:
    assert [share.name for share in every_share(ensemble())] == ["gpt2", "gpt2_read", "gpt2_graph"]
    assert [share.ensemble for share in every_share(ensemble())] == [True, False, False]
    assert every_share(replace(ensemble(), server=None)) == []


def test_the_batches_of_an_ensemble_are_those_of_the_part_that_makes_them() -> None:
    (found,) = sizes([("gpt2", ensemble(), 3)])
    assert (found.name, found.counts, found.colour) == ("gpt2: graph", {"8": 100}, 3)
    assert sizes([("gpt2", replace(ensemble(), server=ServerFigures(())), 0)]) == []


def test_nothing_is_said_of_a_queue_that_an_ensemble_does_not_have() -> None:
    assert not [line for line in page(ensemble()).findings if "queue" in line]
    assert [line for line in page(make_run("static")).findings if "queue" in line]
