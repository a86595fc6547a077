"""A real chat model, served by ``openvino``: answers, a whole context, compressed weights."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmserve
from llmserve.errors import InvalidRequestError
from llmserve.testing import LiveTriton
from tests.real.questions import Questions, message
from tests.real.reference import CHATS, TOKENS, Reference

pytestmark = pytest.mark.real

openvino = pytest.importorskip("openvino")

CONTEXT, LONG = 8192, 7900
LOSSES = {"int8": 0.02, "int4": 0.45}
"""By how much the perplexity may rise; it was 0.2 % and 31 %."""
CHUNK, CHUNKS = 256, 3


@pytest.fixture(scope="module")
def models(triton: LiveTriton, real_folder: Path) -> dict[str, Path]:
    """The model with unchanged weights and with compressed ones; made at once, by processes."""

    def build(weights: str) -> Path:
        return llmserve.build(
            "openvino",
            str(real_folder),
            name=f"real-{weights}",
            output=triton.repository,
            weight_format=weights,
            dtype="float32" if weights == "auto" else "auto",
        ).folder

    formats = ("auto", *LOSSES)
    with ThreadPoolExecutor(len(formats)) as pool:
        return dict(zip(formats, pool.map(build, formats), strict=True))


@pytest.fixture(scope="module")
def served(triton: LiveTriton, models: dict[str, Path]) -> LiveTriton:
    triton.server.load(*(models[weights].name for weights in ("auto", "int8")))
    return triton


def test_answers_are_those_of_generate(
    served: LiveTriton, models: dict[str, Path], reference: Reference
) -> None:
    def ask(chat: str) -> str:
        messages = message(chat)
        return served.client.generate(
            models["auto"].name, messages=messages, max_tokens=TOKENS
        ).text

    with ThreadPoolExecutor(len(CHATS)) as pool:
        assert list(pool.map(ask, CHATS)) == reference.answers


def test_a_prompt_of_the_whole_context_is_computed_once(
    served: LiveTriton, models: dict[str, Path], reference: Reference
) -> None:
    ask = Questions(served.client, models["int8"].name, reference.text(LONG))
    first, slow = ask("What is this text about?")
    again, fast = ask("What is this text about?")
    _, other = ask("Which language is it about?")
    print(f"{ask.tokens} tokens: {slow:.1f} s, again {fast:.2f} s, another end {other:.2f} s")
    assert LONG < ask.tokens < CONTEXT
    assert first == again
    assert max(fast, other) < slow / 4
    with pytest.raises(InvalidRequestError, match="8192"):
        Questions(served.client, models["int8"].name, reference.text(CONTEXT))("And now?")


def test_compressed_weights_lose_no_more_than_is_stated(
    models: dict[str, Path], reference: Reference
) -> None:
    ids = reference.tokenizer.encode(reference.text(CHUNK * CHUNKS + 50))
    chunks = [ids[start : start + CHUNK] for start in range(0, CHUNK * CHUNKS, CHUNK)]
    whole = reference.perplexity(chunks)
    for weights, most in LOSSES.items():
        loss = perplexity(models[weights], chunks) / whole - 1
        print(f"{weights}: perplexity {whole:.2f}, {loss:+.1%}")
        # More than nothing: the weights are compressed.
        assert 0 < abs(loss) < most


def perplexity(model: Path, chunks: Sequence[Sequence[int]]) -> float:
    """Return that of texts of one length, each without what is before it."""
    properties = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    (file,) = model.rglob("openvino_model.xml")
    compiled: Any = openvino.Core().compile_model(file, "CPU", properties)
    losses = []
    for chunk in np.array(chunks):
        request = compiled.create_infer_request()
        request.infer(
            {
                "input_ids": chunk[None],
                "attention_mask": np.ones((1, len(chunk)), np.int64),
                "position_ids": np.arange(len(chunk))[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        logits = request.get_tensor("logits").data[0, :-1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        chosen = logits[np.arange(len(chunk) - 1), chunk[1:]]
        losses.append(np.log(np.exp(logits).sum(-1)) - chosen)
    return float(np.exp(np.concatenate(losses).mean()))
