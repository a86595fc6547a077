"""A model that answers each row with what it received, as JSON: text, parameters and inputs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request, len(requests)) for request in requests]

    def _answer(self, request: Any, batch_size: int) -> Any:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        texts = inputs.pop("text_input")
        if texts.flat[0].startswith(b"raise "):
            raise ValueError(texts.flat[0].decode().removeprefix("raise "))
        if texts.flat[0] == b"bytes":
            return self._response(np.full(texts.shape, b"a\xff", dtype=object), texts)
        received = {name: str(value.tolist()) for name, value in inputs.items()}
        answers = [
            json.dumps(
                {
                    "text": text.decode(),
                    "parameters": json.loads(request.parameters()),
                    "inputs": received,
                    "batch_size": batch_size,
                }
            ).encode()
            for text in texts.flat
        ]
        return self._response(np.array(answers, dtype=object).reshape(texts.shape), texts)

    def _response(self, answers: Any, texts: Any) -> Any:
        counts = np.array([len(text) for text in texts.flat], dtype=np.int32)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("text_output", answers),
                pb_utils.Tensor("finish_reason", np.full(texts.shape, b"stop", dtype=object)),
                pb_utils.Tensor("num_input_tokens", counts.reshape(texts.shape)),
                pb_utils.Tensor("num_output_tokens", counts.reshape(texts.shape)),
            ]
        )
