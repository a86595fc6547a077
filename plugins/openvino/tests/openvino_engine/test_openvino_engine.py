"""The runner under the engine: the model's own tokens, guesses, and a pass that fails."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import llmserve
from llmserve.plugin import demo_model_path
from llmserve.runtime import Engine, Generation
from llmserve.testing import ByteTokenizer, fake
from llmserve_openvino.engine import OpenVinoGenerator


def generation(prompt: Sequence[int] = (40, 50, 60), length: int = 8, **params: Any) -> Generation:
    return fake.generation(prompt, length, decode=lambda ids: "x" * len(ids), **params)


def make_engine(converted: Path, output: Path, **options: Any) -> Engine:
    options = {"dtype": "float32", **options}
    built = llmserve.build("openvino", str(converted), output=output, **options)
    settings = built.manifest.components["generator"]["settings"]
    return OpenVinoGenerator(settings, built.folder / "1").stepper(ByteTokenizer())


def finish(engine: Engine) -> int:
    steps = 0
    while engine.busy:
        assert not engine.step().failed
        steps += 1
    assert engine.cache_used == 0
    return steps


def expected(prompt: Sequence[int], length: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(demo_model_path()).eval()
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        for _ in range(length):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return [int(token) for token in ids[0, len(prompt) :]]


def test_any_mix_has_the_tokens_of_the_model(converted: Path, tmp_path: Path) -> None:
    """Prompts in pieces, shared beginnings, and sequences that lose their pages."""
    engine = make_engine(converted, tmp_path, max_sequences=3)
    engine._scheduler.pace.most = 24
    rng = random.Random(5)
    beginning = [rng.randrange(1, 1000) for _ in range(70)]
    prompts = [[rng.randrange(1, 1000) for _ in range(n)] for n in (1, 31, 32, 33, 90)]
    prompts += [[*beginning, 5], [*beginning, 6], [*beginning, 7, 8]]
    requests = [generation(prompt, rng.randrange(4, 40)) for prompt in prompts]
    for request in requests:
        engine.admit(request)
        engine.step()
    finish(engine)
    for request in requests:
        assert request.token_ids == expected(request.prompt_ids, request.max_tokens)
    assert requests[-1].cached_tokens == 64


@pytest.mark.parametrize("guessing", ["prompt_lookup", "draft_model"])
def test_guessing_gives_the_same_tokens(
    converted: Path, tmp_path: Path, guessing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a guess costs is measured, and depends on what else the machine does.
    monkeypatch.setattr("llmserve.runtime.engine.guessing.Price.of_guess", lambda *_: 0.2)
    options_of: dict[str, dict[str, Any]] = {
        "none": {},
        "prompt_lookup": {"prompt_lookup": 5},
        "draft_model": {"draft_model": str(converted), "draft_tokens": 3},
    }
    # The prompt has its answer in it.
    prompt = [40, 50, 60, *expected([40, 50, 60], 50), 40, 50, 60]
    many: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3},
        {"temperature": 0.8, "seed": 7},
        {"min_tokens": 30, "logprobs": 2},
    ]
    answers = []
    for name in ("none", guessing):
        engine = make_engine(converted, tmp_path / name, **options_of[name])
        requests = [generation(prompt, 40, **params) for params in many]
        for request in requests:
            engine.admit(request)
        finish(engine)
        answers.append([(request.token_ids, len(request.logprobs)) for request in requests])
    assert answers[0] == answers[1]
    assert 0 < engine.accepted_tokens <= engine.guessed_tokens


def test_a_cache_has_the_size_that_is_asked_for(converted: Path, tmp_path: Path) -> None:
    engine = make_engine(converted, tmp_path / "asked", cache_gb=1)
    # Two numbers of four bytes for each head, layer and place of a head.
    model = AutoModelForCausalLM.from_pretrained(demo_model_path())
    token_bytes = 8 * model.config.hidden_size * model.config.num_hidden_layers
    assert engine.cache_tokens == pytest.approx((1 << 30) / token_bytes, rel=0.01)
    default = make_engine(converted, tmp_path / "default", max_sequences=8)
    assert default.cache_tokens == 4 * 512
    runner: Any = default._runner
    for memory in runner._memory:
        assert not memory.any(), "a kernel may multiply what is there by zero"
        assert memory.ctypes.data % 64 == 0


@pytest.mark.parametrize("kv_cache", ["f16", "u8"])
def test_a_smaller_cache_decodes(converted: Path, tmp_path: Path, kv_cache: str) -> None:
    engine = make_engine(converted, tmp_path, kv_cache=kv_cache)
    requests = [generation([9, 8, 7 + n] * 20, 20) for n in range(3)]
    for request in requests:
        engine.admit(request)
    finish(engine)
    right = [request.token_ids == expected(request.prompt_ids, 20) for request in requests]
    assert any(right)


def test_a_cache_in_a_type_that_is_not_computed_has_the_one_that_is(
    converted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(converted, tmp_path, kv_cache="bf16")
    engine.admit(request := generation(length=12))
    finish(engine)
    assert request.token_ids == expected(request.prompt_ids, 12)
    assert "the cache is in f32, not in bf16" in caplog.text


def test_prompts_do_not_share_pages_if_they_may_not(converted: Path, tmp_path: Path) -> None:
    engine = make_engine(converted, tmp_path, prefix_cache=False)
    for _ in range(2):
        request = generation(range(1, 80), 2)
        engine.admit(request)
        finish(engine)
        assert request.cached_tokens == 0


def test_a_pass_that_fails_does_not_break_the_next(converted: Path, tmp_path: Path) -> None:
    engine = make_engine(converted, tmp_path)
    request = generation([40, 50, 60], 12)
    engine.admit(request)
    for _ in range(3):
        engine.step()
    runner: Any = engine._runner

    class Broken:
        def set_tensor(self, *_: object) -> None:
            pass

        def infer(self, *, share_outputs: bool) -> None:
            raise RuntimeError("Check failed")

    runner._compiled._request = Broken()
    with pytest.raises(RuntimeError, match="Check failed"):
        engine.step()
    finish(engine)
    assert request.token_ids == expected([40, 50, 60], 12)


def test_weights_are_in_memory_once(converted: Path, tmp_path: Path) -> None:
    """The processor's form of them, and none of the file's, which is mapped."""
    engine = make_engine(converted, tmp_path)
    assert not engine.busy
    file = next(tmp_path.glob("*/1/openvino/*.bin")).resolve()
    mapped = resident = 0
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.endswith(f" {file}"):
            found = dict(re.findall(r"(\w+): +(\d+) kB", "\n".join(itertools.islice(lines, 4))))
            mapped, resident = mapped + int(found["Size"]), resident + int(found["Rss"])
    assert mapped > 5000
    assert resident < mapped / 10
