"""What is exported is loaded by a Triton as it stands, and computes what the model does."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from tritonclient import grpc as triton_grpc

from llmserve.demo import demo_model_path
from llmserve.testing import LiveTriton
from llmserve.testing.command import run

IDS = [[40, 87, 301, 12, 9], [7]]
"""The prompt of a sequence, and the token that follows it."""


def logits_of(triton: LiveTriton, model: str) -> list[NDArray[np.float32]]:
    """Send a sequence of two steps as a client without llmserve would."""
    client = triton_grpc.InferenceServerClient(triton.server.grpc_url)
    found, past = [], 0
    for step, ids in enumerate(IDS):
        # The cache begins with one column of nothing, which is masked.
        values = {
            "input_ids__0": ids,
            "position_ids__1": range(past, past + len(ids)),
            "attention_mask__2": [0, *[1] * (past + len(ids))],
            "past_mask__3": [0, *[1] * past],
        }
        inputs = []
        for name, row in values.items():
            tensor = np.array([list(row)], dtype=np.int64)
            inputs.append(triton_grpc.InferInput(name, list(tensor.shape), "INT64"))
            inputs[-1].set_data_from_numpy(tensor)
        answer = client.infer(
            model, inputs, sequence_id=77, sequence_start=step == 0,
            sequence_end=step == len(IDS) - 1,
        )  # fmt: skip
        found.append(answer.as_numpy("logits__0").reshape(-1))
        past += len(ids)
    return found


@pytest.mark.long
def test_an_exported_graph_computes_what_the_model_does(triton: LiveTriton, tmp_path: Path) -> None:
    # TorchScript can run any code: the stand-in of libtorch loads none that a build did not note.
    name = "plain"
    built, plain = tmp_path / "models", tmp_path / "plain"
    words = ["--plugin", "gpt2-onnx", "--model", "demo", "--name", name, "--output", str(built)]
    done = run("build", *words)
    assert done.returncode == 0, done.stderr
    done = run("export", name, "--repository", str(built), "--out", str(plain))
    assert done.returncode == 0, done.stderr
    (folder,) = plain.iterdir()
    served = triton.repository / folder.name
    shutil.copytree(folder, served)
    triton.load(folder.name)
    try:
        found = logits_of(triton, folder.name)
    finally:
        triton.unload(folder.name)
        shutil.rmtree(served)
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
    with torch.inference_mode():
        whole = model(input_ids=torch.tensor([[*IDS[0], *IDS[1]]])).logits[0].numpy()
    expected = [whole[len(IDS[0]) - 1], whole[-1]]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
