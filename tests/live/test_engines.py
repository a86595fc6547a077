"""Every engine behind every driver gives the answers of ``generate()``."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmserve.demo import demo_model_path
from llmserve.testing import LiveTriton

PROMPTS = ("Programming in C++ is like", "Once upon a time", "Hello", "The capital of France is")


@pytest.fixture(scope="module")
def sources(triton: LiveTriton, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what each engine is built from; for OpenVINO it is converted once."""
    folder = tmp_path_factory.mktemp("converted") / "demo-openvino"
    shutil.copytree(triton.repository / triton.build("openvino") / "1" / "openvino", folder)
    for path in demo_model_path().glob("*.json"):
        shutil.copy(path, folder)
    return {"iterative": "demo", "openvino": str(folder)}


@pytest.fixture(scope="module")
def expected(triton: LiveTriton) -> dict[str, str]:
    model = triton.build("hf")
    return {p: triton.client.generate(model, p, max_tokens=32).text for p in PROMPTS}


@pytest.mark.parametrize("batching", ["static", "dynamic", "continuous", "iterative"])
@pytest.mark.parametrize("engine", ["iterative", "openvino"])
def test_an_engine_behind_a_driver(
    triton: LiveTriton,
    sources: dict[str, str],
    expected: dict[str, str],
    engine: str,
    batching: str,
) -> None:
    model = triton.build(engine, sources[engine], batching=batching, dtype="float32")
    client = triton.client
    assert client.generate(model, PROMPTS[0], max_tokens=32).text == expected[PROMPTS[0]]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda p: client.generate(model, p, max_tokens=32).text, PROMPTS))
    assert answers == [expected[prompt] for prompt in PROMPTS]
    if batching in ("continuous", "iterative"):
        pieces = [piece.text for piece in client.stream(model, PROMPTS[1], max_tokens=32)]
        assert "".join(pieces) == expected[PROMPTS[1]]
