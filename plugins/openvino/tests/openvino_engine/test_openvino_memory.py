"""A model is built in the memory of a layer, and served in little more than its weights take."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from llmserve.plugin import ModelSize, Value
from llmserve.testing.memory import of_cuda
from llmserve_openvino.needs import needs

pytestmark = [pytest.mark.long, pytest.mark.alone]

# The process that converts it has 1.02 GB of data. All weights in float32 would be 0.40 more.
_DATA = 1_250_000_000


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    path = Path(__file__).parents[2] / "bench" / "size.py"
    spec = spec_from_file_location("openvino_size", path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    # Its dataclasses look for their module there.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


MEASURED = {
    # Layers, parameters and those of the two ends in millions, and what a build had of its own.
    "a vocabulary of 128,256, int4": (4, 310, 262.7, 0.67),
    "0.5 B, bfloat16": (24, 506.6, 81.9, 0.62),
    "1 B, bfloat16": (20, 1012, 131.1, 0.57),
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_build_is_planned_by_its_layers_and_not_by_its_vocabulary(name: str) -> None:
    layers, parameters, ends, measured = MEASURED[name]
    size = ModelSize(
        int(parameters * 1e6), int(2e6 * parameters), "bfloat16", layers=layers,
        ends=int(ends * 1e6), largest=int(ends / 2 * 1e6),
    )  # fmt: skip
    chosen = "int4" if "int4" in name else "auto"
    options: dict[str, Value] = {
        "dtype": "auto", "weight_format": chosen, "kv_cache": "auto", "cache_gb": 0,
        "int4_ratio": 0.68, "int4_group": 32, "max_sequences": 16, "state_mb": 0,
    }  # fmt: skip
    assert needs(size, options).build / 1e9 == pytest.approx(measured, rel=0.15)


def test_a_model_takes_what_its_plugin_says(bench: Any, tmp_path: Path) -> None:
    model, repository = tmp_path / "model", tmp_path / "repository"
    bench.make_model(model, 0.1)
    mark = str(tmp_path)
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        # What torch's libraries for GPUs reserve, and do not use, counts for a limit of data.
        data = 0 if of_cuda() else _DATA
        built = bench.build(model, repository, "openvino", "auto", mark, log, data=data)
        _, answering, _ = bench.serve(repository, mark, log)
    manifest = json.loads((repository / "model" / "llmserve.json").read_text(encoding="utf-8"))
    size = ModelSize.read(manifest["size"])
    expected = needs(size, manifest["options"])
    # The command and the converter have them.
    assert built.peak.own - 2 * of_cuda() < 1.15 * expected.build
    # Few of the cache's pages are written: the prompt and its answer are short. What libraries have
    # of their files is shared with whatever else runs here, so that it differs from run to run.
    taken, own = expected.process + expected.weights, answering.peak.own - of_cuda()
    # Not all processors widen the product of the scores.
    widened = 2 * size.largest if expected.weights > 2 * size.parameters else 0
    assert 0.85 * (taken - widened) < own < 1.15 * taken
    assert own - expected.process < 1.2 * bench.stored(repository)
