"""Prompts that stay warm: a later engine reads what an earlier one has computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.plugin import contract
from llmserve.runtime import Engine
from llmserve.testing import ByteTokenizer, generation
from llmserve_openvino.engine import OpenVinoGenerator

BEGINNING = [(11 * i) % 900 for i in range(70)]


def finish(engine: Engine) -> None:
    while engine.busy:
        assert not engine.step().failed


@pytest.mark.parametrize(
    "options",
    [{"kv_cache": "auto"}, {"kv_cache": "u8"}, {"kv_cache": "f16"}, {"prompt_lookup": 3}],
    ids=["f32", "u8", "f16", "guesses"],
)
def test_an_answer_is_the_same_after_a_restart(
    converted: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = llmserve.build("openvino", str(converted), output=tmp_path, dtype="float32", **options)
    settings = built.manifest.components["generator"]["settings"]

    def restarted(prompt: list[int]) -> tuple[list[int], int | None, int]:
        engine = OpenVinoGenerator(settings, built.folder / "1").stepper(ByteTokenizer())
        engine.admit(request := generation(prompt, 40, decode=lambda ids: "x" * len(ids)))
        finish(engine)
        engine.close()
        return request.token_ids, request.cached_tokens, engine.warm_tokens

    prompts = [*BEGINNING, 1, 2], [*BEGINNING, 3], [*BEGINNING, 1, 2]
    cold = [restarted(prompt) for prompt in prompts]
    monkeypatch.setenv(contract.WARM, str(tmp_path / "pages"))
    warm = [restarted(prompt) for prompt in prompts]
    assert [tokens for tokens, _, _ in warm] == [tokens for tokens, _, _ in cold]
    assert [found for _, *found in cold] == [[0, 0]] * 3
    assert [found for _, *found in warm] == [[0, 0], [64, 64], [64, 64]]
