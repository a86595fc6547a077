"""The engine in process: what breaks a step must not break the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.runtime.generation import Generation
from llmserve.runtime.params import Params
from llmserve.testing import ByteTokenizer

pytest.importorskip("openvino_genai", reason="openvino-genai is not installed")
pytest.importorskip("optimum.intel", reason="optimum-intel, which converts, is not installed")


class Poisoned:
    """A pipeline as one request can leave it: every step fails."""

    def __init__(self, pipeline: Any) -> None:
        self.add_request = pipeline.add_request

    def step(self) -> None:
        raise RuntimeError("Check failed")


def generation() -> Generation:
    return Generation(
        [40, 50, 60],
        Params(),
        max_tokens=8,
        eos_ids=frozenset({0}),
        decode=lambda ids: "x" * len(ids),
    )


def test_a_pipeline_that_fails_is_made_anew(converted: Path, tmp_path: Path) -> None:
    from llmserve_openvino.engine import Engine
    from llmserve_openvino.generator import OpenVinoGenerator

    built = llmserve.build("openvino", str(converted), output=tmp_path)
    manifest = json.loads((built.folder / "llmserve.json").read_text())
    settings = manifest["components"]["generator"]["settings"]
    made = OpenVinoGenerator(settings, built.folder / "1")
    before, lost, after = generation(), generation(), generation()
    made.generate([before], ByteTokenizer())

    pipelines = iter([Poisoned(made.engine.pipeline), made.engine.pipeline])
    engine = Engine(lambda: next(pipelines), vocab_size=1024)
    engine.admit(lost)
    with pytest.raises(RuntimeError, match="Check failed"):
        engine.step()
    assert not engine.busy
    engine.admit(after)
    while engine.busy:
        engine.step()
    assert after.token_ids == before.token_ids
    assert len(after.token_ids) == 8
