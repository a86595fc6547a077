"""The last step of the tutorial on sequences: draws a token, and writes it as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = json.loads(args["model_config"])["parameters"]["model"]["string_value"]
        content = json.loads(Path(folder, "tokenizer.json").read_text(encoding="utf-8"))
        self.words = {number: word for word, number in content["model"]["vocab"].items()}
        # GPT-2 writes each byte as a character; those that cannot be printed are moved up.
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        moved = [value for value in range(256) if value not in plain]
        self.bytes = {chr(value): value for value in plain}
        self.bytes |= {chr(256 + number): value for number, value in enumerate(moved)}

    def execute(self, requests: list[Any]) -> list[Any]:
        responses, decoded_next_token = [], []
        draw = np.random.default_rng()
        for request in requests:
            logits = pb_utils.get_input_tensor_by_name(request, "LOGITS").as_numpy()
            for row in logits:
                chances = np.exp(row[-1].astype(np.float64) - row[-1].max())
                token = int(draw.choice(len(chances), p=chances / chances.sum()))
                data = bytes(self.bytes[character] for character in self.words.get(token, ""))
                decoded_next_token.append(data.decode("utf-8", errors="replaces").encode())
            texts = np.array(decoded_next_token, dtype=object).reshape(1, -1)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", texts)]))
        return responses
