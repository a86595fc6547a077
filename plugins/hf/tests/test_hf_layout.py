"""The layouts of Triton's tutorials: their tensors, and the requests of their clients."""

from __future__ import annotations

import queue
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import np_to_triton_dtype

import llmserve
from llmserve.testing import LiveTriton, read_config

STRING, UINT32 = 13, 4
TEXT, LENGTH = ("text_input", STRING), ("max_tokens", UINT32)


@pytest.mark.parametrize(
    ("layout", "size", "inputs", "echo"),
    [
        ("tutorial", None, [(*TEXT, [-1], False), (*LENGTH, [-1], True)], True),
        ("tutorial", 8, [(*TEXT, [1], False), (*LENGTH, [1], True)], True),
        ("tutorial-text", None, [(*TEXT, [1], False)], True),
        ("tutorial-text", 8, [(*TEXT, [1], False)], False),
    ],
)
def test_the_tensors_are_those_of_the_tutorials_model(
    layout: str, size: int | None, inputs: list[Any], echo: bool, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"max_batch_size": size} if size else {}
    if not echo:
        given["echo"] = echo
    built = llmserve.build("hf", "demo", output=tmp_path, layout=layout, **given)
    config = read_config(built.folder)
    tensors = [(t.name, t.data_type, list(t.dims), t.optional) for t in config.input]
    assert tensors == inputs
    outputs = [(t.name, t.data_type, list(t.dims)) for t in config.output]
    assert outputs == [("text_output", STRING, [-1])]
    assert config.max_batch_size == (size or 0)
    assert config.HasField("dynamic_batching") == bool(size)
    assert not config.model_transaction_policy.decoupled
    assert built.manifest.options["echo"] == echo
    assert built.manifest.options["max_tokens"] == (15 if layout == "tutorial-text" else 0)


def tutorials_request(url: str, model: str, prompt: str, length: int) -> list[Any]:
    """Send the tensors of the tutorial's client over a stream, and return what it receives."""
    received: queue.Queue[Any] = queue.Queue()

    def keep(kept: queue.Queue[Any], result: Any, error: Any) -> None:
        kept.put(error or result.as_numpy("text_output"))

    text = np.array([prompt]).astype(object)
    tokens = np.array([length]).astype(np.uint32)
    inputs = []
    for name, values in (("text_input", text), ("max_tokens", tokens)):
        tensor = grpc.InferInput(name, values.shape, np_to_triton_dtype(values.dtype))
        tensor.set_data_from_numpy(values)
        inputs.append(tensor)
    with grpc.InferenceServerClient(url=url) as client:
        client.start_stream(callback=partial(keep, received))
        client.async_stream_infer(model, inputs)
        client.stop_stream()
    return [received.get_nowait() for _ in range(received.qsize())]


def test_the_tutorials_client_gets_the_prompt_and_its_answer(triton: LiveTriton) -> None:
    model = triton.build("hf", name="llama_python", layout="tutorial")
    prompt = "Programming in C++ is like"
    (long,) = tutorials_request(triton.server.grpc_url, model, prompt, 20)
    assert long.shape == (1,)
    answer = triton.client.generate(model, prompt, max_tokens=20).text
    assert long[0].decode() == answer
    (short,) = tutorials_request(triton.server.grpc_url, model, prompt, 2)
    assert answer.startswith(short[0].decode())
    assert len(prompt) < len(short[0]) < len(long[0])
    # The tutorial's number has no limit; ours is refused in one line.
    (error,) = tutorials_request(triton.server.grpc_url, model, prompt, 2**32 - 1)
    assert "max_tokens must be from 1 to 2147483647, not 4294967295" in str(error)
