"""The baseline: iterative scheduling without a cache, the whole prefix anew for every token.

It does what NVIDIA's tutorial on iterative scheduling shows, and no more: all requests that
Triton hands over make one padded batch, the model runs over all of it, every request is told
its new token and is given back until it has enough of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer


class TritonPythonModel:
    """What Triton loads."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model as its author would, in the type of its checkpoint."""
        config = json.loads(args["model_config"])
        where = config["parameters"]["checkpoint"]["string_value"]
        self._device = config["parameters"]["device"]["string_value"]
        self._tokenizer = AutoTokenizer.from_pretrained(Path(where))
        self._model = AutoModelForCausalLM.from_pretrained(where).to(self._device).eval()
        self._texts: dict[int, tuple[list[int], int]] = {}

    @torch.inference_mode()
    def execute(self, requests: list[Any]) -> None:
        """Make one token for each request."""
        numbers = [self._number(request) for request in requests]
        rows = [self._texts[number][0] for number in numbers]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self._device)
        mask = torch.tensor(
            [[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self._device
        )
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._model(ids, attention_mask=mask, position_ids=positions, use_cache=False)[0]
        for request, number, token in zip(
            requests, numbers, logits[:, -1].argmax(-1).tolist(), strict=True
        ):
            row, end = self._texts[number]
            row.append(token)
            self._answer(request, number, row, len(row) >= end)

    def _number(self, request: Any) -> int:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        number = int(tensors["CORRID"].reshape(-1)[0])
        if tensors["START"].reshape(-1)[0]:
            text = tensors["text_input"].reshape(-1)[0].decode()
            ids = self._tokenizer.encode(text)
            wished = json.loads(request.parameters() or "{}").get("max_tokens", 16)
            self._texts[number] = (ids, len(ids) + int(wished))
        return number

    def _answer(self, request: Any, number: int, row: list[int], done: bool) -> None:
        sender = request.get_response_sender()
        text = self._tokenizer.decode(row[-1:]) + " "
        tensor = pb_utils.Tensor("text_output", np.array([[text.encode()]], dtype=np.object_))
        response = pb_utils.InferenceResponse([tensor])
        if done:
            del self._texts[number]
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        sender.send(response)
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
