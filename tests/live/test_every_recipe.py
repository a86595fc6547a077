"""Every recipe answers through the gateway, complete and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from llmserve.testing import LiveTriton
from llmserve.testing.one_layer import one_layer
from tests.live.gateway import Gateway, gateway_of
from tests.support import ROOT

pytestmark = pytest.mark.long

CHAT: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]

# An engine folder as NVIDIA's builder creates it; the stand-in needs only these files.
ENGINE = ROOT / "plugins" / "trtllm" / "tests" / "trtllm_builds" / "engines" / "1.2"
# Without torch, a process starts in a tenth of the time.
LIGHT = {"tokenizer": "tokenizers"}
# The same options as in the plugins' own tests, so that the tests share models.
RECIPES: dict[str, dict[str, Any]] = {
    "hf": {},
    "hf-unary": {"plugin": "hf", "decoupled": False},
    "iterative": {},
    "openvino": {},
    "gpt2-onnx": {},
    "gpt2-torchscript": {"batching": "sequence-oldest", **LIGHT},
    "trtllm": {"engine": str(ENGINE), "bls_instance_count": 2, **LIGHT},
    "trtllm-llmapi": {
        "plugin": "trtllm",
        "layout": "llmapi",
        "stand_in": True,
        "bls_instance_count": 2,
        **LIGHT,
    },
}


@pytest.fixture(scope="module")
def gateway(triton: LiveTriton) -> Iterator[Gateway]:
    with gateway_of(triton) as gateway:
        yield gateway


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_answers(
    triton: LiveTriton, gateway: Gateway, recipe: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = dict(RECIPES[recipe])
    source = "demo"
    if recipe.startswith("gpt2"):
        source = str(one_layer(tmp_path_factory.getbasetemp() / "one-layer"))
    model = triton.build(options.pop("plugin", recipe), source, **options)
    client = gateway.client()
    expected = triton.client.generate(model, messages=CHAT, max_tokens=40)
    chat = client.chat.completions.create(model=model, messages=CHAT, max_tokens=40)
    assert chat.choices[0].message.content == expected.text != ""
    assert chat.choices[0].finish_reason == expected.finish_reason
    if not recipe.startswith("gpt2"):
        assert expected.text == "The capital of Japan is Tokyo."
    request: Any = {"model": model, "prompt": "Once upon a time", "max_tokens": 6}
    whole = client.completions.create(**request)
    stream = list(
        client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason == "length"
    assert stream[-1].usage == whole.usage
    assert whole.usage
    assert whole.usage.completion_tokens == 6
    word = text[-4:]
    stopped = client.completions.create(**{**request, "max_tokens": 20}, stop=word)
    assert stopped.choices[0].text == text[: text.index(word)]
    tokenized = gateway.post("/tokenize", {"model": model, "prompt": "Once upon a time"}).json()
    assert (tokenized["count"], tokenized["max_model_len"]) == (4, 512)
    back = gateway.post("/detokenize", {"model": model, "tokens": tokenized["tokens"]}).json()
    assert back == {"prompt": "Once upon a time"}
    ids = client.completions.create(**{**request, "prompt": tokenized["tokens"]})
    assert ids.choices[0].text == whole.choices[0].text
    listed = {entry["id"] for entry in httpx.get(f"{gateway.url}/models").json()["data"]}
    assert model in listed
    assert not [name for name in listed if name.startswith(f"{model}_")]
