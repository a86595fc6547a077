"""The tutorial on iterative scheduling: each call adds one token to every sequence."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = json.loads(args["model_config"])["parameters"]["model"]["string_value"]
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.sequences: dict[int, dict[str, Any]] = {}

    def execute(self, requests: list[Any]) -> None:
        states = [self.state(request) for request in requests]
        tokens = self.next_tokens([state["ids"] for state in states])
        for request, state, token in zip(requests, states, tokens, strict=True):
            state["ids"].append(token)
            state["left"] -= 1
            piece = self.tokenizer.decode([token])
            output = pb_utils.Tensor("text_output", np.array([[piece.encode()]], dtype=object))
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([output]))
            is_end = token == self.tokenizer.eos_token_id and not state["ignore_eos"]
            if is_end or state["left"] <= 0:
                del self.sequences[state["number"]]
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
            else:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)

    def state(self, request: Any) -> dict[str, Any]:
        tensors = {tensor.name(): tensor.as_numpy().flat[0] for tensor in request.inputs()}
        number = int(tensors["CORRID"])
        if tensors["START"]:
            parameters = json.loads(request.parameters())
            self.sequences[number] = {
                "number": number,
                "ids": self.tokenizer.encode(tensors["text_input"].decode()),
                "left": parameters["max_tokens"],
                "ignore_eos": parameters["ignore_eos"],
            }
        return self.sequences[number]

    def next_tokens(self, rows: list[list[int]]) -> list[int]:
        """Compute the whole prefix of every sequence again, padded on the left."""
        longest = max(map(len, rows))
        padding = self.tokenizer.eos_token_id
        ids = torch.tensor([[padding] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        result = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=padding
        )
        return [int(token) for token in result[:, -1]]
