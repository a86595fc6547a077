"""A request of our own to the engine's model, and its tokens as they come."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any
from uuid import uuid4

import numpy as np

from llmserve_trtllm.runtime.wishes import numpy_type


class EngineModel:
    """The model ``tensorrt_llm`` of this server, as another model asks it."""

    def __init__(self, settings: Mapping[str, Any], pb_utils: Any) -> None:
        self._name: str = settings["engine_model"]
        self._kinds: Mapping[str, str] = settings["engine_kinds"]
        self._echoes: bool = settings["engine_echoes"]
        self._decoupled: bool = settings["streams"]
        self._pb = pb_utils

    def tokens(
        self, values: Mapping[str, Any], *, stream: bool
    ) -> Generator[list[int], None, None]:
        """Send one prompt and give its new tokens as the engine answers.

        ``values`` are by the engine's names; ``input_ids`` is a list, the words are tensors, all
        else is one value.
        """
        given = {**values, "streaming": stream}
        inputs = [
            self._pb.Tensor(name, self._array(name, value))
            for name, value in given.items()
            if name in self._kinds and not (isinstance(value, np.ndarray) and not value.size)
        ]
        outputs = ["output_ids"]
        if "sequence_length" in self._kinds:
            outputs.append("sequence_length")
        number = uuid4().hex
        request = self._pb.InferenceRequest(
            model_name=self._name,
            request_id=number,
            requested_output_names=outputs,
            inputs=inputs,
        )
        skip = len(values["input_ids"]) if self._echoes else 0
        replies = iter(request.exec(decoupled=True) if self._decoupled else [request.exec()])
        ended = False
        try:
            for reply in replies:
                if reply.has_error():
                    raise RuntimeError(reply.error().message())
                # A stream sends what is new; only its first piece can begin with the prompt.
                yield self._ids(reply)[skip:]
                skip = 0
            ended = True
        finally:
            if not ended and "stop" in self._kinds:
                self._stop(number)
            # Triton wants every response taken, wanted or not.
            for _ in replies:
                pass

    def _stop(self, number: str) -> None:
        """Tell the engine that nobody waits for a request any more: by its number."""
        said = {"input_ids": [0], "input_lengths": 1, "request_output_len": 1, "stop": True}
        request = self._pb.InferenceRequest(
            model_name=self._name,
            request_id=number,
            requested_output_names=["output_ids"],
            inputs=[self._pb.Tensor(name, self._array(name, said[name])) for name in said],
        )
        for _ in request.exec(decoupled=True) if self._decoupled else [request.exec()]:
            pass

    def _array(self, name: str, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value
        kind = numpy_type(self._kinds[name])
        values = np.array(value if isinstance(value, list) else [value], kind)
        return values[None]

    @staticmethod
    def _ids(reply: Any) -> list[int]:
        tensors = {t.name(): t.as_numpy() for t in reply.output_tensors()}
        if "output_ids" not in tensors:
            return []
        found = tensors["output_ids"]
        # One prompt and its best beam; the last response of a stream may hold no token at all.
        best = found.reshape(-1)[: found.shape[-1]]
        lengths = tensors.get("sequence_length")
        end = len(best) if lengths is None else int(lengths.reshape(-1)[0])
        return [int(token) for token in best[:end]]
