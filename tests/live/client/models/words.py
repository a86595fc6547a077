"""A model that streams the words of a prompt with a delay, and records cancelled requests."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.journal = Path(args["model_repository"]) / "journal"

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            threading.Thread(target=self._answer, args=(request,)).start()

    def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        options = json.loads(request.parameters())
        prompts = [text.decode() for text in request.inputs()[0].as_numpy().flat]
        rows = [prompt.split() for prompt in prompts]
        if not options.get("stream"):
            sender.send(self._response([" ".join(row) for row in rows], [True] * len(rows)))
        else:
            for step in range(max(len(row) for row in rows)):
                if sender.is_cancelled():
                    with self.journal.open("a") as file:
                        file.write(f"{prompts[0]}\n")
                    break
                if any(row[step : step + 1] == ["refuse"] for row in rows):
                    error = pb_utils.TritonError("no such word", pb_utils.TritonError.INVALID_ARG)
                    # Sent separately, the error and the end would leave a request in the server.
                    sender.send(
                        pb_utils.InferenceResponse(error=error),
                        flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                    )
                    return
                words = [" ".join(row[step : step + 1]) for row in rows]
                sender.send(self._response(words, [step + 1 >= len(row) for row in rows]))
                time.sleep(options.get("delay", 0.01))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _response(self, words: list[str], last: list[bool]) -> Any:
        def column(values: list[Any], kind: Any) -> Any:
            return np.array(values, dtype=kind).reshape(-1, 1)

        reasons = [b"stop" if end else b"" for end in last]
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("text_output", column([word.encode() for word in words], object)),
                pb_utils.Tensor("finish_reason", column(reasons, object)),
            ]
        )
