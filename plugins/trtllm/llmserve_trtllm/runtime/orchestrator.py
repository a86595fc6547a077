"""The model ``tensorrt_llm_bls``: calls the engine and keeps track of what it has sent.

Its requests and answers are those of every model of llmserve: pieces join to the whole answer, stop
words are hidden, and the last piece contains the finish reason and the number of tokens.
"""

from __future__ import annotations

from collections.abc import Generator as GeneratorType
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmserve.runtime import (
    Generation,
    Job,
    Parts,
    Prompt,
    RequestError,
    Tensors,
    error_of_model,
    tensors_of,
)
from llmserve_trtllm.runtime.engine_request import RequestWriter, array

Answers = GeneratorType[tuple[list[int], Tensors], None, None]


class Orchestrator:
    """Answers one request at a time, so Triton's instances of the model limit the concurrency.

    Triton's Python backend cannot handle two streams from other models in one process: 2.51
    crashed within seconds to half a minute of load, and not once with a single stream.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._settings = settings

    def start(self, parts: Parts) -> None:
        self._parts = parts
        # Only ``format`` of the formatter: the engine itself constrains the answers.
        self._formatter: Any = SimpleNamespace(format=parts.formatter.format)
        self._writer = RequestWriter(self._settings, parts)
        self._model = EngineModel(self._settings, parts.pb_utils)

    def execute(self, requests: Sequence[Any]) -> None:
        for raw in requests:
            # Triton processes the calls of this process in order: once this one returns, Triton
            # has finished with all earlier streams.
            raw.is_cancelled()
            self._model.free_streams()
            outputs = _Outputs(self._parts.pb_utils)
            job = Job(raw, replace(self._parts, pb_utils=outputs, formatter=self._formatter))
            try:
                job.admit(raw, renamed=self._settings["names"])
                inputs = tensors_of(raw)
                rows = job.generations
                engine_inputs = [
                    (generation, self._tensors(generation, inputs, row, len(rows)))
                    for row, generation in enumerate(rows)
                    if not generation.done
                ]
                for generation, tensors in engine_inputs:
                    self._answer(generation, tensors, outputs)
            except Exception as error:
                job.responder.fail(error)

    def finalize(self) -> None:
        self._model.free_streams()

    def _answer(self, generation: Generation, tensors: Tensors, outputs: _Outputs) -> None:
        with closing(self._model.answers(tensors, stream=self._settings["streams"])) as answers:
            for tokens, scores in answers:
                outputs.add(scores)
                for token in tokens:
                    generation.push(token)
                # An answer of full length ends on its own.
                if generation.done and generation.finish_reason != "length":
                    break
        generation.end()

    @staticmethod
    def _prompt(generation: Generation) -> Prompt:
        ids, params = generation.prompt_ids, generation.params
        return Prompt(generation.prompt, ids, params, images=generation.images)

    def _tensors(self, generation: Generation, inputs: Tensors, row: int, rows: int) -> Tensors:
        """Return the engine's inputs for one row of a request."""
        row_inputs = {name: values[row : row + 1] for name, values in inputs.items()}
        names = [name for name in self._settings["direct"] if name in row_inputs]
        tensors = {name: row_inputs[name] for name in names}
        if "num_return_sequences" in tensors and (tensors["num_return_sequences"] > 1).any():
            raise RequestError(
                "num_return_sequences over 1 needs a model built with "
                "--set stream_through=ensemble",
                code="unsupported_option",
                param="num_return_sequences",
            )
        if rows > 1 and any(tensors[name].any() for name in names if name.startswith("return_")):
            raise RequestError("scores are sent for only one prompt: send several requests")
        outputs = self._writer.write(
            [self._prompt(generation)],
            [generation.max_tokens],
            row_inputs.get("embedding_bias_words"),
            row_inputs.get("embedding_bias_weights"),
        )
        types: Mapping[str, str] = self._settings["makes"]
        engine_names: Mapping[str, str] = self._settings["engine_names"]
        for name in sorted(engine_names.keys() & outputs.keys()):
            values = array(outputs[name], types[name])
            # Empty word lists and guides are not sent.
            if values.size and values.item(0) != b"":
                tensors[engine_names[name]] = values
        return tensors


class _Outputs:
    """Triton's utilities for the responses of one request.

    They send the engine's scores together with their tokens, and the text in one dimension, as
    NVIDIA's clients read it.
    """

    def __init__(self, pb_utils: Any) -> None:
        self._pb = pb_utils
        self._scores: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pb, name)

    def add(self, scores: Tensors) -> None:
        """Keep scores for the next response; scores per token are concatenated."""
        for name, values in scores.items():
            before = self._scores.get(name)
            joins = before is not None and name == "output_log_probs"
            self._scores[name] = np.concatenate([before, values], -1) if joins else values

    def Tensor(self, name: str, values: Any) -> Any:
        return self._pb.Tensor(name, values.reshape(-1) if name == "text_output" else values)

    def InferenceResponse(self, output_tensors: Sequence[Any], **kwargs: Any) -> Any:
        scores, self._scores = self._scores, {}
        if kwargs.get("error") is None:
            output_tensors = [*output_tensors, *(self._pb.Tensor(*item) for item in scores.items())]
        return self._pb.InferenceResponse(output_tensors=output_tensors, **kwargs)


class EngineModel:
    """The model ``tensorrt_llm`` of this server, called from another model."""

    def __init__(self, settings: Mapping[str, Any], pb_utils: Any) -> None:
        self._name: str = settings["engine_model"]
        self._scores: Sequence[str] = settings["scores"]
        self._echoes: bool = settings["engine_echoes"]
        self._decoupled: bool = settings["streams"]
        self._pb = pb_utils
        # Triton keeps an ended stream a moment longer, and the last owner frees it. Before 24.12
        # Triton frees it without holding Python's lock, which crashes Python 3.12.
        self._streams: list[Any] = []

    def free_streams(self) -> None:
        """Free all streams; call this only after Triton has released them."""
        self._streams.clear()

    def answers(self, tensors: Tensors, *, stream: bool) -> Answers:
        """Send one prompt and yield its new tokens and their scores as the engine answers."""
        # An unstreamed answer may begin with the prompt; a stream has only new tokens.
        skip = tensors["input_ids"].size if self._echoes and not stream else 0
        responses = self._send({**tensors, "streaming": np.array([[stream]])})
        self._streams.append(responses)
        ended = False
        try:
            for response in responses:
                if response.has_error():
                    raise error_of_model(response.error().message())
                outputs = {t.name(): t.as_numpy() for t in response.output_tensors()}
                scores = {name: outputs[name] for name in self._scores if name in outputs}
                yield _ids(outputs)[skip:], scores
                skip = 0
            ended = True
        finally:
            if not ended:
                self._cancel(responses)

    def _send(self, tensors: Tensors) -> Any:
        inputs = [self._pb.Tensor(name, values) for name, values in tensors.items()]
        outputs = ["output_ids", "sequence_length"]
        if any(name.startswith("return_") for name in tensors):
            outputs += self._scores
        request = self._pb.InferenceRequest(
            model_name=self._name, requested_output_names=outputs, inputs=inputs
        )
        return request.exec(decoupled=True) if self._decoupled else iter([request.exec()])

    @staticmethod
    def _cancel(responses: Any) -> None:
        """Discard the rest of an answer.

        From 25.05 on Triton can cancel it. Before, the engine generates the whole answer: a request
        with ``stop`` would be a second stream in this process, and that crashed it.
        """
        if cancel := getattr(responses, "cancel", None):
            cancel()
        # Triton requires every response to be read, even if it is not needed.
        for _ in responses:
            pass


def _ids(tensors: Tensors) -> list[int]:
    if "output_ids" not in tensors:
        return []
    beams = tensors["output_ids"]
    # One prompt and its best beam; the last response of a stream may contain no token at all.
    best = beams.reshape(-1)[: beams.shape[-1]]
    ids: list[int] = best[: tensors["sequence_length"].item(0)].tolist()
    return ids
