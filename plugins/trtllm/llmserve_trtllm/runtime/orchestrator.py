"""The model ``tensorrt_llm_bls``: asks the engine itself, and so remembers what it has sent.

It reads and answers as every model of llmserve does: pieces join to the whole, stop words never
show, and the last piece says why the answer ended and how many tokens it took.
"""

from __future__ import annotations

from collections.abc import Generator as GeneratorType
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from llmserve.runtime import Generation, Job, Parts, RequestError, Tensors, tensors_of
from llmserve_trtllm.runtime.limits import EngineLimits, Renamed
from llmserve_trtllm.runtime.sampling import (
    SamplingValues,
    bias_of,
    numpy_type,
    pad_of,
    word_ids,
    word_tensor,
)


class Orchestrator:
    """Answers one request after another: as many at a time as Triton has instances of it.

    Two streams from other models in one process are more than Triton's Python backend bears:
    2.51 crashed within seconds to half a minute of load, and not once with one at a time.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._settings = settings
        self._inside: Mapping[str, str] = settings["inside"]

    def start(self, parts: Parts) -> None:
        """Take the tokenizer, the formatter and the engine's limits."""
        self._parts = parts
        self._limits: EngineLimits = parts.generator
        self._values = SamplingValues(
            self._settings["sampling"], max_beam_width=self._limits.max_beam_width
        )
        self._model = EngineModel(self._settings, parts.pb_utils)

    def execute(self, requests: Sequence[Any]) -> None:
        """Answer requests; the answers leave through their responders."""
        for raw in requests:
            outputs = _Outputs(self._parts.pb_utils)
            job = Job(raw, replace(self._parts, pb_utils=outputs))
            try:
                job.admit(Renamed(raw, self._settings["names"]))
                given = tensors_of(raw)
                asked = [
                    self._tensors(generation, given, row, len(job.generations))
                    for row, generation in enumerate(job.generations)
                ]
                for generation, values in zip(job.generations, asked, strict=True):
                    self._answer(generation, values, outputs)
            except RequestError as error:
                job.responder.refuse(str(error))
            except Exception as error:
                job.responder.fail(error)

    def finalize(self) -> None:
        """Nothing is held."""

    def _answer(self, generation: Generation, values: Mapping[str, Any], outputs: _Outputs) -> None:
        with closing(self._model.answers(values, stream=self._settings["streams"])) as answers:
            for tokens, scores in answers:
                outputs.add(scores)
                for token in tokens:
                    generation.push(token)
                # What has its length ends by itself.
                if generation.done and generation.finish_reason != "length":
                    break
        generation.end()

    def _tensors(
        self, generation: Generation, given: Tensors, row: int, rows: int
    ) -> dict[str, Any]:
        params, tokenizer = generation.params, self._parts.tokenizer
        self._limits.check_prompt(generation.prompt_ids)
        # The ends that matter are the generation's own; one of them goes to the engine, and what
        # comes after another is not read.
        ends = [] if params.ignore_eos else sorted(generation.eos_ids)
        end = ends[0] if ends else self._settings["no_end"]
        own = self._limits.pad_id
        pad = pad_of(params, own if own is not None else max(end, 0))
        values = self._values.values(params, end_id=end, pad_id=pad)
        stops = word_ids(params.stop_words, tokenizer) + [[other] for other in ends[1:]]
        words, weights = given.get("embedding_bias_words"), given.get("embedding_bias_weights")
        bias = bias_of(words, weights, rows, self._limits.vocab_size, tokenizer)
        return {
            "input_ids": generation.prompt_ids,
            "input_lengths": len(generation.prompt_ids),
            "request_output_len": generation.max_tokens,
            "stop_words_list": word_tensor([stops]),
            "bad_words_list": word_tensor([word_ids(params.bad_words, tokenizer)]),
            "embedding_bias": bias[row : row + 1],
            **self._direct(given, row, rows),
            **{self._inside[name]: value for name, value in values.items()},
        }

    def _direct(self, given: Tensors, row: int, rows: int) -> Tensors:
        """What goes to the engine as it came."""
        direct = {name: given[name] for name in self._settings["direct"] if name in given}
        count = direct.get("num_return_sequences")
        if count is not None and (count > 1).any():
            raise RequestError(
                "num_return_sequences over 1 needs a model built with --set stream_through=ensemble"
            )
        if rows > 1 and any(direct[name].any() for name in direct if name.startswith("return_")):
            raise RequestError("scores are sent for one prompt at a time: send several requests")
        return {name: values[row : row + 1] for name, values in direct.items()}


class _Outputs:
    """Triton's utilities for the responses of one request.

    The engine's scores go out with the tokens that they are of, and the text has one dimension,
    as NVIDIA's clients read it.
    """

    def __init__(self, pb_utils: Any) -> None:
        self._pb = pb_utils
        self._scores: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pb, name)

    def add(self, scores: Tensors) -> None:
        """Keep scores for the next response; those of every token join to a row."""
        for name, values in scores.items():
            before = self._scores.get(name)
            joins = before is not None and name == "output_log_probs"
            self._scores[name] = np.concatenate([before, values], -1) if joins else values

    def Tensor(self, name: str, values: Any) -> Any:
        """Make an output tensor."""
        return self._pb.Tensor(name, values.reshape(-1) if name == "text_output" else values)

    def InferenceResponse(self, output_tensors: Sequence[Any], **more: Any) -> Any:
        """Make a response."""
        scores, self._scores = self._scores, {}
        if more.get("error") is None:
            output_tensors = [*output_tensors, *(self._pb.Tensor(*one) for one in scores.items())]
        return self._pb.InferenceResponse(output_tensors=output_tensors, **more)


class EngineModel:
    """The model ``tensorrt_llm`` of this server, as another model asks it."""

    def __init__(self, settings: Mapping[str, Any], pb_utils: Any) -> None:
        self._name: str = settings["engine_model"]
        self._kinds: Mapping[str, str] = settings["engine_kinds"]
        self._scores: Sequence[str] = settings["scores"]
        self._echoes: bool = settings["engine_echoes"]
        self._decoupled: bool = settings["streams"]
        self._pb = pb_utils

    def answers(
        self, values: Mapping[str, Any], *, stream: bool
    ) -> GeneratorType[tuple[list[int], Tensors], None, None]:
        """Send one prompt and give its new tokens and their scores as the engine answers.

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
        # Before 0.14 there is a 0 for every score that nobody asked for, and clients count on it.
        unasked = "sequence_index" not in self._scores
        if unasked or any(name.startswith("return_") for name in values):
            outputs += self._scores
        number = uuid4().hex
        # An answer in one piece may begin with the prompt; a stream has new tokens only.
        skip = len(values["input_ids"]) if self._echoes and not stream else 0
        replies = self._ask(number, inputs, outputs)
        ended = False
        try:
            for reply in replies:
                if reply.has_error():
                    raise RuntimeError(reply.error().message())
                tensors = {t.name(): t.as_numpy() for t in reply.output_tensors()}
                scores = {name: tensors[name] for name in self._scores if name in tensors}
                yield _ids(tensors)[skip:], scores
                skip = 0
            ended = True
        finally:
            if not ended and "stop" in self._kinds:
                self._stop(number)
            # Triton wants every response taken, wanted or not.
            for _ in replies:
                pass

    def _ask(self, number: str, inputs: Sequence[Any], outputs: Sequence[str]) -> Iterator[Any]:
        request = self._pb.InferenceRequest(
            model_name=self._name,
            request_id=number,
            requested_output_names=outputs,
            inputs=inputs,
        )
        return iter(request.exec(decoupled=True) if self._decoupled else [request.exec()])

    def _stop(self, number: str) -> None:
        """Tell the engine that nobody waits for a request any more: by its number."""
        values = {"input_ids": [0], "input_lengths": 1, "request_output_len": 1, "stop": True}
        inputs = [self._pb.Tensor(name, self._array(name, values[name])) for name in values]
        for _ in self._ask(number, inputs, ["output_ids"]):
            pass

    def _array(self, name: str, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value
        kind = numpy_type(self._kinds[name])
        values = np.array(value if isinstance(value, list) else [value], kind)
        return values[None]


def _ids(tensors: Tensors) -> list[int]:
    if "output_ids" not in tensors:
        return []
    found = tensors["output_ids"]
    # One prompt and its best beam; the last response of a stream may hold no token at all.
    best = found.reshape(-1)[: found.shape[-1]]
    lengths = tensors.get("sequence_length")
    end = len(best) if lengths is None else int(lengths.reshape(-1)[0])
    return [int(token) for token in best[:end]]
