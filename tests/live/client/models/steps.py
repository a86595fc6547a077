"""A model that returns one word per step of a sequence, and records starts and ends."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.journal = Path(args["model_repository"]) / "journal"
        self.words: dict[int, list[str]] = {}
        self.delay: dict[int, float] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._step(request) for request in requests]

    def _step(self, request: Any) -> Any:
        inputs = {tensor.name(): tensor.as_numpy().flat[0] for tensor in request.inputs()}
        sequence = int(inputs["CORRID"])
        if inputs["START"]:
            self.words[sequence] = inputs["text_input"].decode().split()
            self.delay[sequence] = json.loads(request.parameters()).get("delay", 0)
            self._record("start", sequence)
        words = self.words[sequence]
        if inputs["END"]:
            self._record("end", sequence)
            del self.words[sequence]
            return self._response("", "")
        time.sleep(self.delay[sequence])
        if words[:1] == ["refuse"]:
            error = pb_utils.TritonError("no such word", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        word = words.pop(0) if words else ""
        return self._response(word, "" if words else "stop")

    def _record(self, event: str, sequence: int) -> None:
        with self.journal.open("a") as file:
            file.write(f"{event} {sequence}\n")

    def _response(self, text: str, reason: str) -> Any:
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("text_output", np.array([[text.encode()]], dtype=object)),
                pb_utils.Tensor("finish_reason", np.array([[reason.encode()]], dtype=object)),
            ]
        )
