"""Measurements say plainly when a stand-in answered, and only then."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from llmserve.measure.export import to_csv
from llmserve.measure.figures import Snapshot, difference, parts_of
from llmserve.measure.published import read_page
from llmserve.measure.results import Run, load, save
from llmserve.measure.runs import ServerFigures
from llmserve.measure.standins import find, notes, told_on
from llmserve.report import page
from llmserve.server.backends.telling import METRIC, Notice
from llmserve.testing import FakeBackendUtils
from llmserve_cli.shown import print_sweep
from tests.unit.report_examples import make_comparison, make_run, make_sweep
from tests.unit.test_measure_figures import statistics

PAGE = f"""
# TYPE {METRIC} gauge
{METRIC}{{instead_of="TensorRT-LLM",model="engine"}} 1
{METRIC}{{instead_of="TensorRT-LLM",model="gone"}} 0
{METRIC}{{instead_of="nobody knows"}} 1
"""


def config(name: str, backend: str, runtime: str = "", **parameters: str) -> Any:
    made = pb.ModelConfig(name=name, backend=backend, runtime=runtime)
    for key, value in parameters.items():
        made.parameters[f"llmserve.{key}"].string_value = value
    return made


def found(page: str = "", **configs: Any) -> dict[str, str]:
    return find(configs, page)


def test_a_stand_in_is_known_by_what_it_says_itself() -> None:
    assert told_on(PAGE) == {"engine": "TensorRT-LLM"}
    # The LLM API runs in the Python backend like any model, and only it can tell.
    assert found(PAGE, engine=config("engine", "python")) == {"engine": "TensorRT-LLM"}
    assert found(PAGE, other=config("other", "python")) == {}


def test_without_metrics_it_is_known_by_what_triton_runs() -> None:
    ours = {"version": "0.1.0"}
    assert found(engine=config("engine", "tensorrtllm", "model.py", **ours)) == {
        "engine": "TensorRT-LLM"
    }
    assert found(graph=config("graph", "onnxruntime", "model.py", **ours)) == {
        "graph": "Triton's backend onnxruntime"
    }


@pytest.mark.parametrize(
    "real",
    [
        config("engine", "tensorrtllm", "libtriton_tensorrtllm.so", version="0.1.0"),
        config("engine", "onnxruntime", "libtriton_onnxruntime.so", version="0.1.0"),
    ],
)
def test_a_library_is_nobodys_stand_in_whatever_a_page_says(real: Any) -> None:
    assert found(PAGE, engine=real) == {}


def test_a_backend_of_somebody_elses_in_python_is_none_of_ours() -> None:
    assert found(llm=config("llm", "vllm", "model.py")) == {}
    assert found(net=config("net", "pytorch", "model.py")) == {}


def test_the_parts_of_a_model_are_its_steps_and_those_that_they_ask() -> None:
    made = config("demo", "", parts="demo_a demo_asked demo_b")
    for step in ("demo_b", "demo_a"):
        made.ensemble_scheduling.step.add(model_name=step)
    assert parts_of(made) == ["demo_b", "demo_a", "demo_asked"]
    assert parts_of(config("plain", "python")) == []


def test_what_stood_in_during_the_window_is_kept_and_idle_parts_are_left_out() -> None:
    still = statistics(10, 10, {})
    before = Snapshot({"demo": still, "demo_b": still, "demo_idle": still}, {})
    after = Snapshot(
        {"demo": still, "demo_b": statistics(30, 20, {}), "demo_idle": still}, {},
        {"demo_b": "TensorRT-LLM"},
    )  # fmt: skip
    server = difference(before, after)
    assert server is not None
    assert [model.model for model in server.models] == ["demo", "demo_b"]
    assert server.stand_ins == {"demo_b": "TensorRT-LLM"}


def test_it_is_no_figure_among_those_that_models_publish() -> None:
    assert read_page(PAGE, ["engine"]).gauges == {}


def stood_in(run: Run) -> Run:
    assert run.server
    server = replace(run.server, stand_ins={"engine": "TensorRT-LLM"})
    return replace(run, server=server)


def test_json_and_csv_have_it(tmp_path: Path) -> None:
    run = stood_in(make_run("static"))
    save(run, tmp_path / "run.json")
    again = load(tmp_path / "run.json")
    assert isinstance(again, Run)
    assert isinstance(again.server, ServerFigures)
    assert again.server.stand_ins == {"engine": "TensorRT-LLM"}
    lines = list(csv.DictReader(io.StringIO(to_csv(run))))
    assert {line["stand_in"] for line in lines} == {"TensorRT-LLM"}
    plain = list(csv.DictReader(io.StringIO(to_csv(make_run("static")))))
    assert {line["stand_in"] for line in plain} == {""}


def test_notes_name_what_was_measured_once() -> None:
    run = stood_in(make_run("static"))
    names = [f"variant {at}" for at in range(6)]
    assert notes([(name, run) for name in (*names, *names)]) == [
        "variant 0, variant 1, variant 2, variant 3 and 2 more: llmserve's stand-in answered in "
        "place of TensorRT-LLM; these figures say nothing of how fast that is"
    ]
    assert notes([("plain", make_run("static"))]) == []


def test_a_sweep_marks_its_variants(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = make_sweep()
    first, *others = sweep.variants
    marked = replace(first, runs=tuple(map(stood_in, first.runs)))
    print_sweep(replace(sweep, variants=(marked, *others)))
    told = capsys.readouterr()
    assert told.out.count(" (stand-in) ") == 1
    assert f"| {first.name} (stand-in)" in told.out
    assert "in place of TensorRT-LLM" in told.err


def test_every_report_warns_of_it_at_its_top() -> None:
    warning = "stand-in answered in place of TensorRT-LLM"
    run = make_run("static")
    comparison, sweep = make_comparison(), make_sweep()
    cells = tuple(replace(c, runs=tuple(map(stood_in, c.runs))) for c in comparison.cells)
    variants = tuple(replace(v, runs=tuple(map(stood_in, v.runs))) for v in sweep.variants)
    marked = (
        stood_in(run), replace(comparison, cells=cells), replace(sweep, variants=variants),
    )  # fmt: skip
    for result in marked:
        assert [line for line in page(result).warnings if warning in line]
    for result in (run, comparison, sweep):
        assert not [line for line in page(result).warnings if "stand-in" in line]


def test_a_stand_in_says_so_in_the_log_where_there_are_no_metrics() -> None:
    class Without(FakeBackendUtils):
        def __init__(self) -> None:
            super().__init__()
            self.MetricFamily = self.refused  # type: ignore[assignment]

        def refused(self, *given: object) -> None:
            raise RuntimeError("metrics are off")

    for utils in (FakeBackendUtils(), Without()):
        notice = Notice(utils, "engine", "TensorRT-LLM", "PyTorch")
        notice.close()
        assert len(utils.Logger.warnings) == 1
        assert "stand-in for TensorRT-LLM" in utils.Logger.warnings[0]
