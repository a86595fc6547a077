"""The engine in process: what breaks a step must not break the next."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import llmserve
from llmserve.runtime.generation import Generation
from llmserve.runtime.params import Params
from llmserve.testing import ByteTokenizer

pytest.importorskip("openvino_genai", reason="openvino-genai is not installed")
pytest.importorskip("optimum.intel", reason="optimum-intel, which converts, is not installed")


def generation(**asked: int) -> Generation:
    return Generation(
        [40, 50, 60],
        Params(**asked),  # type: ignore[arg-type]
        max_tokens=8,
        eos_ids=frozenset({0}),
        decode=ByteTokenizer().decode,
    )


def test_a_request_that_breaks_a_step_is_gone_with_it(converted: Path, tmp_path: Path) -> None:
    from openvino import Tensor
    from openvino_genai import GenerationConfig, StructuredOutputConfig

    from llmserve_openvino.generator import OpenVinoGenerator

    built = llmserve.build("openvino", str(converted), output=tmp_path)
    settings = json.loads((built.folder / "llmserve.json").read_text())["components"]["generator"]
    made = OpenVinoGenerator(settings["settings"], built.folder / "1")
    before, after, beside = generation(), generation(), generation()
    made.generate([before], ByteTokenizer())
    config = GenerationConfig()
    config.max_new_tokens = 4
    config.structured_output_config = StructuredOutputConfig(json_schema="{")
    made.engine.admit(beside)
    made.engine.pipeline.add_request(99, Tensor(np.array([[40]], dtype=np.int64)), config)
    with pytest.raises(RuntimeError):
        made.engine.step()
    assert not made.engine.busy
    made.generate([after], ByteTokenizer())
    assert after.token_ids == before.token_ids
    assert len(after.token_ids) == 8
