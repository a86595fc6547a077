"""The model ``tensorrt_llm`` without an engine: NVIDIA's LLM API behind the engine's tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np

from llmserve.runtime import Parts, RequestError, Responder, Tensors, located, tensors_of
from llmserve_trtllm.runtime.engine_request import words_of

_MOST_UNDER_WAY = 1024
"""Each request has a thread that waits for its answer; the LLM API itself waits for none."""
_WORDS = ("stop_words_list", "bad_words_list")


class LlmApi:
    """Hands requests to ``tensorrt_llm.LLM`` as they come; it is what batches them."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._settings = settings
        self._guided: str = settings["guided_decoding_backend"]
        self._folder = folder
        self._stand_in: Any = None
        self._running: dict[str, list[Any]] = {}
        self._threads = ThreadPoolExecutor(_MOST_UNDER_WAY)

    def start(self, parts: Parts) -> None:
        """Load the model; without TensorRT-LLM only where the build asked for the stand-in."""
        self._parts = parts
        self._context: int = parts.generator.context_length
        try:
            import tensorrt_llm
        except ImportError:
            if not self._settings["stand_in"]:
                raise RuntimeError(
                    "TensorRT-LLM is not installed here: serve this in NVIDIA's container, or "
                    "build it with --set stand_in=true to try it with PyTorch"
                ) from None
            self._stand_in = _load_stand_in(parts.name, self._settings, self._folder)
        else:
            self._llm = self._load(tensorrt_llm)

    def execute(self, requests: Sequence[Any]) -> None:
        if self._stand_in is not None:
            self._stand_in.execute(requests)
            return
        for raw in requests:
            given = tensors_of(raw)
            answer = _Answer(raw, given, self._parts, streams=self._settings["streams"])
            if "stop" in given and given["stop"].any():
                for result in self._running.get(answer.id, ()):
                    result.abort()
                # With nothing, as the engine's backend answers it.
                answer.respond(final=True)
                continue
            try:
                answer.rows = self._rows(given)
            except RequestError as error:
                answer.fail(error)
            else:
                self._threads.submit(self._answer, answer)

    def finalize(self) -> None:
        self._threads.shutdown()
        if self._stand_in is not None:
            self._stand_in.finalize()
        elif hasattr(self, "_llm"):
            self._llm.shutdown()

    def _rows(self, given: Tensors) -> list[_Row]:
        rows = []
        for index, ids in enumerate(given["input_ids"]):
            asked: dict[str, Any] = {
                name: values.reshape(-1).item(index)
                for name, values in given.items()
                if name not in ("input_ids", *_WORDS)
            }
            prompt = ids[: asked["input_lengths"]].tolist()
            wanted = asked["request_output_len"]
            if wanted < 1 or len(prompt) + wanted > self._context:
                raise RequestError(
                    f"request_output_len {wanted} and the prompt's {len(prompt)} tokens are over "
                    f"the model's {self._context}"
                )
            for name in _WORDS:
                asked[name] = words_of(given[name][index]) if name in given else []
            # With its tokenizer, LLM makes these words of texts, which are not known here.
            if self._guided and any(len(word) > 1 for word in asked["bad_words_list"]):
                raise RequestError(
                    "a model that can hold answers to a form takes no bad_words of several tokens "
                    "here"
                )
            rows.append(_Row(prompt, asked))
        return rows

    def _answer(self, answer: _Answer) -> None:
        """Answer a request: its rows are made together, and are sent one after another."""
        try:
            results = [
                self._llm.generate_async(row.ids, sampling(row), streaming=answer.streams)
                for row in answer.rows
            ]
            self._running[answer.id] = results
            for row, result in zip(answer.rows, results, strict=True):
                for output in result if answer.streams else [result.result()]:
                    row.take(output.outputs[0].token_ids)
                    if row.ended or answer.cancelled():
                        result.abort()
                        break
                    if answer.streams:
                        answer.respond()
            answer.respond(final=True)
        except Exception as error:
            answer.fail(error)
        finally:
            self._running.pop(answer.id, None)

    def _load(self, tensorrt_llm: Any) -> Any:
        from tensorrt_llm.llmapi import CapacitySchedulerPolicy, KvCacheConfig, SchedulerConfig

        given = self._settings
        where, options = located(given, self._folder)
        guided = {"guided_decoding_backend": self._guided} if self._guided else {}
        policy = getattr(CapacitySchedulerPolicy, given["scheduler"])
        return tensorrt_llm.LLM(
            model=where,
            # A form is compiled for a tokenizer.
            skip_tokenizer_init=not self._guided,
            **guided,
            trust_remote_code=options["trust_remote_code"],
            revision=options.get("revision"),
            dtype=given["dtype"],
            tensor_parallel_size=given["tensor_parallel"],
            pipeline_parallel_size=given["pipeline_parallel"],
            max_batch_size=given["max_batch_size"],
            max_seq_len=self._context,
            scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
            kv_cache_config=KvCacheConfig(**given["kv_cache"]),
        )


@dataclass
class _Row:
    """One prompt, what is asked for it, and its tokens so far."""

    ids: list[int]
    asked: Mapping[str, Any]
    tokens: list[int] = field(default_factory=list)
    sent: int = 0
    ended: bool = False

    def take(self, tokens: Sequence[int]) -> None:
        """Take all tokens so far; what comes after a stop word is left out."""
        for token in tokens[len(self.tokens) :]:
            if self.ended:
                return
            self.tokens.append(token)
            if len(self.tokens) >= self.asked.get("min_tokens", 0):
                self.ended = any(
                    self.tokens[-len(word) :] == word for word in self.asked["stop_words_list"]
                )


def sampling(row: _Row) -> Any:
    from tensorrt_llm import SamplingParams

    asked = row.asked
    top_k, top_p = asked.get("runtime_top_k", 0), asked.get("runtime_top_p", 0.0)
    # With neither of them TensorRT-LLM takes the likeliest token.
    greedy = top_k == 1 or not (top_k or top_p)
    end = asked.get("end_id", -1)
    params = SamplingParams(
        max_tokens=asked["request_output_len"],
        end_id=end,
        pad_id=max(asked.get("pad_id", end), 0),
        bad_token_ids=[word[0] for word in asked["bad_words_list"] if len(word) == 1] or None,
        temperature=None if greedy else asked.get("temperature"),
        top_k=1 if greedy else top_k or None,
        top_p=None if greedy else top_p or None,
        seed=asked.get("seed"),
        repetition_penalty=asked.get("repetition_penalty"),
        presence_penalty=asked.get("presence_penalty"),
        frequency_penalty=asked.get("frequency_penalty"),
        min_tokens=asked.get("min_tokens") or None,
        guided_decoding=_guided(asked),
        detokenize=False,
    )
    if longer := [word for word in asked["bad_words_list"] if len(word) > 1]:
        # Words of several tokens have no public field: LLM fills this one in with its tokenizer,
        # and here preprocessing has done so (tensorrt_llm/sampling_params.py, _get_bad_words).
        params.bad = [""] * len(longer)
        params._bad_word_ids = longer
    return params


def _guided(asked: Mapping[str, Any]) -> Any:
    """Return what the answer is held to, as the LLM API is told of it."""
    names = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
    kind, guide = (asked.get(f"guided_decoding_{n}", b"").decode() for n in ("guide_type", "guide"))
    if kind not in names:
        return None
    from tensorrt_llm.llmapi import GuidedDecodingParams

    return GuidedDecodingParams(**{names[kind]: guide})


class _Answer(Responder):
    """Sends the tokens of a request's rows, all of them in one response."""

    def __init__(self, raw: Any, given: Tensors, parts: Parts, *, streams: bool) -> None:
        super().__init__(raw, parts)
        self.id: str = raw.request_id()
        self.rows: list[_Row] = []
        self.streams = streams and "streaming" in given and bool(given["streaming"].any())
        exclude = given.get("exclude_input_in_output")
        # As the engine does: a stream has new tokens only.
        self._echo = exclude is not None and not exclude.any() and not self.streams

    def respond(self, *, final: bool = False) -> None:
        """Send what is new, if anything is; at the end, also that it is."""
        pieces = []
        for row in self.rows:
            pieces.append([*(row.ids if self._echo else ()), *row.tokens[row.sent :]])
            row.sent = len(row.tokens)
        if not final and not any(pieces):
            return
        pb, tensors = self._parts.pb_utils, []
        if pieces:
            ids = np.zeros((len(pieces), 1, max(map(len, pieces))), np.int32)
            for row_ids, piece in zip(ids, pieces, strict=True):
                row_ids[0, : len(piece)] = piece
            lengths = np.array([[len(piece)] for piece in pieces], np.int32)
            tensors = [pb.Tensor("output_ids", ids), pb.Tensor("sequence_length", lengths)]
        self._send(pb.InferenceResponse(output_tensors=tensors), final)


def _load_stand_in(name: str, settings: Mapping[str, Any], folder: Path) -> Any:
    """Return a ``TritonPythonModel`` of the installed backend ``tensorrtllm``."""
    from llmserve.errors import PluginError
    from llmserve.registry import Registry
    from llmserve.roles import Backend

    try:
        backend = Registry.load().get(Backend, "tensorrtllm")
    except PluginError as error:
        raise RuntimeError(
            f"there is nothing to stand in for TensorRT-LLM: {error}; "
            "pip install llmserve-standins brings it"
        ) from None
    source = {key: settings[key] for key in ("id", "revision", "path") if key in settings}
    if "path" in source:
        source["path"] = str(folder / source["path"])
    parameters = {
        "gpt_model_path": str(folder),
        "gpt_model_type": settings["model_type"],
        "exclude_input_in_output": "true",
        "llmserve.stand_in": json.dumps(source),
    }
    # The configuration that an engine would have.
    config = {
        "max_batch_size": settings["max_batch_size"],
        "model_transaction_policy": {"decoupled": settings["streams"]},
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        "output": settings["outputs"],
    }
    model = run_path(str(backend.folder / "model.py"))["TritonPythonModel"]()
    model.initialize({"model_name": name, "model_config": json.dumps(config)})
    return model
