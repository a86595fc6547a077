"""Every recipe answers through the gateway, whole and in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.testing import LiveTriton

from .process import Gateway

CHAT: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]

# An engine's folder as NVIDIA's builder leaves it; the stand-in needs no more of it.
ENGINE = Path(__file__).parents[3] / "trtllm" / "tests" / "trtllm_builds" / "engines" / "1.2"
RECIPES: dict[str, dict[str, Any]] = {
    "hf": {},
    "hf-unary": {"plugin": "hf", "decoupled": False},
    "iterative": {},
    "openvino": {},
    "gpt2-onnx": {},
    "gpt2-torchscript": {},
    "trtllm": {"engine": str(ENGINE)},
    "trtllm-llmapi": {"plugin": "trtllm", "layout": "llmapi", "stand_in": True},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_answers(triton: LiveTriton, gateway: Gateway, recipe: str) -> None:
    options = dict(RECIPES[recipe])
    plugin = options.pop("plugin", recipe)
    model = triton.build(plugin, name=f"spoken-{recipe}", **options)
    client = gateway.client()
    chat = client.chat.completions.create(model=model, messages=CHAT, max_tokens=40)
    assert chat.choices[0].message.content == "The capital of Japan is Tokyo."
    assert chat.choices[0].finish_reason == "stop"
    asked: Any = {"model": model, "prompt": "Once upon a time", "max_tokens": 6}
    whole = client.completions.create(**asked)
    stream = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason == "length"
    assert stream[-1].usage == whole.usage
    assert whole.usage
    assert whole.usage.completion_tokens == 6
    stopped = client.completions.create(**{**asked, "max_tokens": 20}, stop=" little")
    assert stopped.choices[0].text == " there was a"
    told = gateway.post("/tokenize", {"model": model, "prompt": "Once upon a time"}).json()
    assert (told["count"], told["max_model_len"]) == (4, 512)
    back = gateway.post("/detokenize", {"model": model, "tokens": told["tokens"]}).json()
    assert back == {"prompt": "Once upon a time"}
    ids = client.completions.create(**{**asked, "prompt": told["tokens"]})
    assert ids.choices[0].text == whole.choices[0].text
    listed = {one["id"] for one in httpx.get(f"{gateway.url}/models").json()["data"]}
    assert model in listed
    assert not [name for name in listed if name.startswith(f"{model}_")]
