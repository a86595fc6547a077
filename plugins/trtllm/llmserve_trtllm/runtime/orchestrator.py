"""The model ``tensorrt_llm_bls``: asks the engine itself, and so remembers what it has sent.

It reads and answers as every model of llmserve does: pieces join to the whole, stop words never
show, and the last piece says why the answer ended and how many tokens it took.
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

from llmserve.runtime import Generation, Job, Parts, Prompt, RequestError, Tensors, tensors_of
from llmserve_trtllm.runtime.engine_request import RequestWriter, array

Answers = GeneratorType[tuple[list[int], Tensors], None, None]


class Orchestrator:
    """Answers one request after another: as many at a time as Triton has instances of it.

    Two streams from other models in one process are more than Triton's Python backend bears:
    2.51 crashed within seconds to half a minute of load, and not once with one at a time.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._settings = settings

    def start(self, parts: Parts) -> None:
        self._parts = parts
        # The engine holds answers to a form, and this only writes them down.
        self._formatter: Any = SimpleNamespace(format=parts.formatter.format)
        self._writer = RequestWriter(self._settings, parts)
        self._model = EngineModel(self._settings, parts.pb_utils)

    def execute(self, requests: Sequence[Any]) -> None:
        for raw in requests:
            # Triton does what this process asks of it in turn: with an answer to this, it is
            # through with the streams before.
            raw.is_cancelled()
            self._model.let_go()
            outputs = _Outputs(self._parts.pb_utils)
            job = Job(raw, replace(self._parts, pb_utils=outputs, formatter=self._formatter))
            try:
                job.admit(raw, renamed=self._settings["names"])
                given = tensors_of(raw)
                rows = job.generations
                asked = [
                    (generation, self._tensors(generation, given, row, len(rows)))
                    for row, generation in enumerate(rows)
                    if not generation.done
                ]
                for generation, tensors in asked:
                    self._answer(generation, tensors, outputs)
            except Exception as error:
                job.responder.fail(error)

    def finalize(self) -> None:
        self._model.let_go()

    def _answer(self, generation: Generation, tensors: Tensors, outputs: _Outputs) -> None:
        with closing(self._model.answers(tensors, stream=self._settings["streams"])) as answers:
            for tokens, scores in answers:
                outputs.add(scores)
                for token in tokens:
                    generation.push(token)
                # What has its length ends by itself.
                if generation.done and generation.finish_reason != "length":
                    break
        generation.end()

    def _tensors(self, generation: Generation, given: Tensors, row: int, rows: int) -> Tensors:
        """Return the engine's inputs for one row of a request."""
        mine = {name: values[row : row + 1] for name, values in given.items()}
        direct = {name: mine[name] for name in self._settings["direct"] if name in mine}
        if "num_return_sequences" in direct and (direct["num_return_sequences"] > 1).any():
            raise RequestError(
                "num_return_sequences over 1 needs a model built with --set stream_through=ensemble"
            )
        if rows > 1 and any(direct[name].any() for name in direct if name.startswith("return_")):
            raise RequestError("scores are sent for one prompt at a time: send several requests")
        written = self._writer.write(
            [Prompt(generation.prompt, generation.prompt_ids, generation.params)],
            [generation.max_tokens],
            mine.get("embedding_bias_words"),
            mine.get("embedding_bias_weights"),
        )
        makes: Mapping[str, str] = self._settings["makes"]
        names: Mapping[str, str] = self._settings["engine_names"]
        for name in sorted(names.keys() & written.keys()):
            values = array(written[name], makes[name])
            # No words and no form are not sent at all.
            if values.size and values.item(0) != b"":
                direct[names[name]] = values
        return direct


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
        return self._pb.Tensor(name, values.reshape(-1) if name == "text_output" else values)

    def InferenceResponse(self, output_tensors: Sequence[Any], **more: Any) -> Any:
        scores, self._scores = self._scores, {}
        if more.get("error") is None:
            output_tensors = [*output_tensors, *(self._pb.Tensor(*one) for one in scores.items())]
        return self._pb.InferenceResponse(output_tensors=output_tensors, **more)


class EngineModel:
    """The model ``tensorrt_llm`` of this server, as another model asks it."""

    def __init__(self, settings: Mapping[str, Any], pb_utils: Any) -> None:
        self._name: str = settings["engine_model"]
        self._scores: Sequence[str] = settings["scores"]
        self._echoes: bool = settings["engine_echoes"]
        self._decoupled: bool = settings["streams"]
        self._pb = pb_utils
        # A stream that has ended is held by Triton too, for a moment more, and whoever lets go last
        # frees it. Before 24.12 Triton does so without Python's lock: Python 3.12 crashes.
        self._ended: list[Any] = []

    def let_go(self) -> None:
        """Free the streams that have ended; only when Triton holds them no more."""
        self._ended.clear()

    def answers(self, tensors: Tensors, *, stream: bool) -> Answers:
        """Send one prompt and give its new tokens and their scores as the engine answers."""
        # An answer in one piece may begin with the prompt; a stream has new tokens only.
        skip = tensors["input_ids"].size if self._echoes and not stream else 0
        replies = self._ask({**tensors, "streaming": np.array([[stream]])})
        self._ended.append(replies)
        ended = False
        try:
            for reply in replies:
                if reply.has_error():
                    raise RuntimeError(reply.error().message())
                made = {t.name(): t.as_numpy() for t in reply.output_tensors()}
                scores = {name: made[name] for name in self._scores if name in made}
                yield _ids(made)[skip:], scores
                skip = 0
            ended = True
        finally:
            if not ended:
                self._leave(replies)

    def _ask(self, tensors: Tensors) -> Any:
        inputs = [self._pb.Tensor(name, values) for name, values in tensors.items()]
        outputs = ["output_ids", "sequence_length"]
        # Before 0.14 there is a 0 for every score that nobody asked for, and clients count on it.
        unasked = "sequence_index" not in self._scores
        if unasked or any(name.startswith("return_") for name in tensors):
            outputs += self._scores
        request = self._pb.InferenceRequest(
            model_name=self._name, requested_output_names=outputs, inputs=inputs
        )
        return request.exec(decoupled=True) if self._decoupled else iter([request.exec()])

    @staticmethod
    def _leave(replies: Any) -> None:
        """Give up the rest of an answer.

        From 25.05 on Triton takes that back. Before, the engine makes it to its end: a request that
        says stop would be a second stream in this process, and that crashed it.
        """
        if cancel := getattr(replies, "cancel", None):
            cancel()
        # Triton wants every response taken, wanted or not.
        for _ in replies:
            pass


def _ids(tensors: Tensors) -> list[int]:
    if "output_ids" not in tensors:
        return []
    found = tensors["output_ids"]
    # One prompt and its best beam; the last response of a stream may hold no token at all.
    best = found.reshape(-1)[: found.shape[-1]]
    ids: list[int] = best[: tensors["sequence_length"].item(0)].tolist()
    return ids
