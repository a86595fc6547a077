"""Log-probabilities through in-flight batching, and as TensorRT-LLM's clients know them."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from llmserve.testing import LiveTriton
from llmserve.testing.logprobs import PROMPT, check_logprobs


@pytest.mark.parametrize("options", [{}, {"batching": "static", "max_batch_size": 8}])
def test_they_are_those_of_the_models_logits(triton: LiveTriton, options: dict[str, Any]) -> None:
    check_logprobs(triton, triton.build("iterative", **options))


def test_they_are_in_http_under_both_names(triton: LiveTriton) -> None:
    model = triton.build("iterative")
    body = json.dumps({"text_input": PROMPT, "max_tokens": 3, "return_log_probs": True})
    url = f"{triton.server.http_url}/v2/models/{model}/generate"
    with urllib.request.urlopen(urllib.request.Request(url, body.encode())) as answer:
        found = json.loads(answer.read())
    each = [entry["logprob"] for entry in json.loads(found["logprobs"])]
    assert len(each) == 3
    assert found["output_log_probs"] == pytest.approx(each, abs=1e-5)
    assert found["cum_log_probs"] == pytest.approx(sum(each), abs=1e-5)
