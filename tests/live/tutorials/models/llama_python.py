"""The tutorial that serves Llama with the text generation pipeline, one request after another."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import transformers
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = json.loads(args["model_config"])["parameters"]["model"]["string_value"]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.pipeline = transformers.pipeline(
            "text-generation", model=folder, tokenizer=self.tokenizer
        )
        self.pipeline.tokenizer.pad_token_id = self.tokenizer.eos_token_id

    def execute(self, requests: list[Any]) -> list[Any]:
        prompts, lengths = [], []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input")
            length = pb_utils.get_input_tensor_by_name(request, "max_tokens")
            prompts.append(text.as_numpy()[0].decode())
            lengths.append(length.as_numpy()[0])
        answers = self.pipeline(
            prompts,
            max_new_tokens=lengths[0],
            pad_token_id=self.tokenizer.eos_token_id,
            batch_size=len(prompts),
        )
        responses, texts = [], []
        for answer in answers:
            texts.append(answer[0]["generated_text"])
            output = pb_utils.Tensor("text_output", np.array(texts, dtype=object))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
