"""The model ``tensorrt_llm`` of the layout ``llmapi``: the LLM API behind the engine's tensors."""

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
from llmserve.runtime.contract import IMAGE_LIMITS
from llmserve_trtllm.runtime.adapters import AdapterQueue, LlmApiAdapters
from llmserve_trtllm.runtime.engine_request import words_of
from llmserve_trtllm.runtime.prompts import SeeingPrompts

_MAX_REQUESTS = 1024
"""A thread waits for the answer of each request; the LLM API itself does not block."""
_WORDS = ("stop_words_list", "bad_words_list")
_IMAGES = "image_url"


class LlmApi:
    """Passes requests to ``tensorrt_llm.LLM`` as they arrive; the LLM API batches them."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._settings = settings
        self._guided: str = settings["guided_decoding_backend"]
        self._folder = folder
        self._prompts: SeeingPrompts | None = None
        """For a model that reads images."""
        self._stand_in: Any = None
        self._running: dict[str, _Answer] = {}
        """Those that wait for their adapters, and those that are generated."""
        self._threads = ThreadPoolExecutor(_MAX_REQUESTS)

    def start(self, parts: Parts) -> None:
        """Load the model, or the stand-in if TensorRT-LLM is missing and the build allows it."""
        self._parts = parts
        self._context: int = parts.generator.context_length
        self._adapters = self._adapter_queue(parts.generator.home)
        try:
            import tensorrt_llm
        except ImportError:
            if not self._settings["stand_in"]:
                raise RuntimeError(
                    "TensorRT-LLM is not installed here: serve the model in NVIDIA's container, or "
                    "build it with --set stand_in=true to try it with PyTorch"
                ) from None
            self._stand_in = _load_stand_in(parts.name, self._settings, self._folder)
        else:
            # Models that were built before there were images have no such setting.
            if IMAGE_LIMITS in self._settings:
                self._prompts = SeeingPrompts(self._settings, self._folder)
            self._llm = self._load(tensorrt_llm)

    def execute(self, requests: Sequence[Any]) -> None:
        if self._stand_in is not None:
            self._stand_in.execute([raw for raw in requests if not self._refused(raw)])
            return
        for raw in requests:
            inputs = tensors_of(raw)
            answer = _Answer(raw, inputs, self._parts, streams=self._settings["streams"])
            if "stop" in inputs and inputs["stop"].any():
                if (running := self._running.get(answer.id)) is not None:
                    running.stop()
                # An empty response, as the engine's backend sends it.
                answer.respond(final=True)
                continue
            try:
                answer.rows = self._rows(inputs)
            except RequestError as error:
                answer.responder.fail(error)
            else:
                self._running[answer.id] = answer
                self._threads.submit(self._answer, answer)

    def finalize(self) -> None:
        self._threads.shutdown()
        if self._stand_in is not None:
            self._stand_in.finalize()
        elif hasattr(self, "_llm"):
            self._llm.shutdown()

    def _refused(self, raw: Any) -> bool:
        """Refuse a request that names an adapter, which the stand-in would leave out."""
        names = tensors_of(raw).get("adapter")
        if names is None or not any(names.reshape(-1)):
            return False
        Responder(raw, self._parts).fail(
            RequestError(
                "the stand-in for TensorRT-LLM has no adapters",
                code="unsupported_option",
                param="adapter",
            )
        )
        return True

    def _rows(self, inputs: Tensors) -> list[_Row]:
        rows = []
        for index, ids in enumerate(inputs["input_ids"]):
            options: dict[str, Any] = {
                name: values.reshape(-1).item(index)
                for name, values in inputs.items()
                if name not in ("input_ids", _IMAGES, *_WORDS)
            }
            prompt = ids[: options["input_lengths"]].tolist()
            length = options["request_output_len"]
            if length < 1 or len(prompt) + length > self._context:
                raise RequestError(
                    f"request_output_len {length} and the prompt's {len(prompt)} tokens do not fit "
                    f"the model's context of {self._context}",
                    code="context_length_exceeded",
                    param="max_tokens",
                    context=self._context,
                    prompt_tokens=len(prompt),
                    max_tokens=length,
                )
            for name in _WORDS:
                options[name] = words_of(inputs[name][index]) if name in inputs else []
            # If LLM has a tokenizer, it encodes bad words from their texts, which are unknown here.
            if self._has_tokenizer and any(len(word) > 1 for word in options["bad_words_list"]):
                raise RequestError(
                    "bad_words of several tokens are not supported by a model with guided decoding "
                    "or images",
                    code="unsupported_option",
                    param="bad_words",
                )
            urls = inputs[_IMAGES][index].reshape(-1) if _IMAGES in inputs else ()
            images = [url.decode(errors="replace") for url in urls if url]
            rows.append(_Row(prompt, options, images))
        return rows

    def _answer(self, answer: _Answer) -> None:
        """Answer a request: its rows are generated together and sent one after another."""
        try:
            if self._adapters is None:
                self._generate(answer, {})
            else:
                with self._adapters.held(row.adapter for row in answer.rows) as held:
                    self._generate(answer, held)
        except Exception as error:
            answer.responder.fail(error)
        finally:
            if self._running.get(answer.id) is answer:
                del self._running[answer.id]

    def _generate(self, answer: _Answer, held: Mapping[str, Any]) -> None:
        # While it waited for its adapters, its client may have left.
        rows = [] if answer.is_stopped or answer.responder.cancelled(now=True) else answer.rows
        prompts = [self._prompt(row) for row in rows]
        for row, prompt in zip(rows, prompts, strict=True):
            lora = {"lora_request": held[row.adapter]} if row.adapter else {}
            answer.results.append(
                self._submitted(row, prompt, sampling(row), streaming=answer.streams, **lora)
            )
        if answer.is_stopped:
            answer.stop()
        for row, result in zip(rows, answer.results, strict=True):
            for output in result if answer.streams else [result.result()]:
                row.update(output.outputs[0].token_ids)
                if row.ended or answer.responder.cancelled():
                    result.abort()
                    break
                if answer.streams:
                    answer.respond()
        # Before others wait for the adapters that it holds, and may have them read.
        answer.respond(final=True)

    @property
    def _has_tokenizer(self) -> bool:
        """Whether LLM gets one: a guide is compiled for it, and the text around images encoded."""
        return bool(self._guided or self._prompts)

    def _prompt(self, row: _Row) -> Any:
        return self._prompts.prompt(row.ids, row.images) if self._prompts else row.ids

    def _submitted(self, row: _Row, prompt: Any, params: Any, **options: Any) -> Any:
        try:
            return self._llm.generate_async(prompt, params, **options)
        except (ValueError, IndexError, TypeError) as error:
            if not row.images:
                raise
            # Such as an image that is too narrow for the model's processor.
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            problem = f"TensorRT-LLM refuses these images: {reason[:200]}"
            raise RequestError(problem, code="invalid_value", param=_IMAGES) from None

    def _adapter_queue(self, home: Path | None) -> AdapterQueue | None:
        if home is None:
            return None
        adapters = LlmApiAdapters(self._settings, self._folder, home)
        return AdapterQueue(adapters, home, self._settings["adapter_mb"] * 1_000_000)

    def _load(self, tensorrt_llm: Any) -> Any:
        from tensorrt_llm.llmapi import CapacitySchedulerPolicy, KvCacheConfig, SchedulerConfig

        settings = self._settings
        path, options = located(settings, self._folder)
        guided = {"guided_decoding_backend": self._guided} if self._guided else {}
        sampler = {"sampler_type": kind} if (kind := settings["sampler_type"]) else {}
        policy = getattr(CapacitySchedulerPolicy, settings["scheduler"])
        return tensorrt_llm.LLM(
            model=path,
            skip_tokenizer_init=not self._has_tokenizer,
            **guided,
            **sampler,
            trust_remote_code=options["trust_remote_code"],
            revision=options.get("revision"),
            dtype=settings["dtype"],
            tensor_parallel_size=settings["tensor_parallel"],
            pipeline_parallel_size=settings["pipeline_parallel"],
            max_batch_size=settings["max_batch_size"],
            max_seq_len=self._context,
            scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
            kv_cache_config=KvCacheConfig(**settings["kv_cache"]),
            **(self._adapters.arguments if self._adapters else {}),
        )


@dataclass
class _Row:
    """One prompt, its request options, and its tokens so far."""

    ids: list[int]
    options: Mapping[str, Any]
    images: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sent: int = 0
    ended: bool = False

    @property
    def adapter(self) -> str:
        """The name of its adapter, if it has one."""
        return str(self.options.get("adapter", b"").decode())

    def update(self, tokens: Sequence[int]) -> None:
        """Store all tokens so far, up to the first stop word."""
        for token in tokens[len(self.tokens) :]:
            if self.ended:
                return
            self.tokens.append(token)
            if len(self.tokens) >= self.options.get("min_tokens", 0):
                self.ended = any(
                    self.tokens[-len(word) :] == word for word in self.options["stop_words_list"]
                )


def sampling(row: _Row) -> Any:
    from tensorrt_llm import SamplingParams

    options = row.options
    top_k, top_p = options.get("runtime_top_k", 0), options.get("runtime_top_p", 0.0)
    # With neither of them TensorRT-LLM chooses the likeliest token.
    greedy = top_k == 1 or not (top_k or top_p)
    end = options.get("end_id", -1)
    params = SamplingParams(
        max_tokens=options["request_output_len"],
        end_id=end,
        pad_id=max(options.get("pad_id", end), 0),
        bad_token_ids=[word[0] for word in options["bad_words_list"] if len(word) == 1] or None,
        temperature=None if greedy else options.get("temperature"),
        top_k=1 if greedy else top_k or None,
        top_p=None if greedy else top_p or None,
        seed=options.get("seed"),
        repetition_penalty=options.get("repetition_penalty"),
        presence_penalty=options.get("presence_penalty"),
        frequency_penalty=options.get("frequency_penalty"),
        min_tokens=options.get("min_tokens") or None,
        guided_decoding=_guided_decoding(options),
        detokenize=False,
    )
    if longer := [word for word in options["bad_words_list"] if len(word) > 1]:
        # Words of several tokens have no public field: LLM fills in this one with its tokenizer,
        # and here preprocessing has done so (tensorrt_llm/sampling_params.py, _get_bad_words).
        params.bad = [""] * len(longer)
        params._bad_word_ids = longer
    return params


def _guided_decoding(options: Mapping[str, Any]) -> Any:
    """Return the guide in the form of the LLM API, None if there is none."""
    names = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
    fields = ("guided_decoding_guide_type", "guided_decoding_guide")
    kind, guide = (options.get(name, b"").decode() for name in fields)
    if kind not in names:
        return None
    from tensorrt_llm.llmapi import GuidedDecodingParams

    return GuidedDecodingParams(**{names[kind]: guide})


class _Answer:
    """Sends the tokens of all rows of a request in one response."""

    def __init__(self, raw: Any, inputs: Tensors, parts: Parts, *, streams: bool) -> None:
        self.responder = Responder(raw, parts)
        self.id: str = raw.request_id()
        self.rows: list[_Row] = []
        self.results: list[Any] = []
        """What the LLM API generates for each row, once it does."""
        self.is_stopped = False
        self.streams = streams and "streaming" in inputs and bool(inputs["streaming"].any())
        exclude = inputs.get("exclude_input_in_output")
        # As in the engine, a stream has only new tokens.
        self._echo = exclude is not None and not exclude.any() and not self.streams

    def stop(self) -> None:
        """Have no more generated."""
        self.is_stopped = True
        for result in [*self.results]:
            result.abort()

    def respond(self, *, final: bool = False) -> None:
        """Send the new tokens, if there are any; a final response is always sent."""
        pieces = []
        for row in self.rows:
            pieces.append([*(row.ids if self._echo else ()), *row.tokens[row.sent :]])
            row.sent = len(row.tokens)
        if not final and not any(pieces):
            return
        tensors = {}
        if pieces:
            ids = np.zeros((len(pieces), 1, max(map(len, pieces))), np.int32)
            for row_ids, piece in zip(ids, pieces, strict=True):
                row_ids[0, : len(piece)] = piece
            lengths = np.array([[len(piece)] for piece in pieces], np.int32)
            tensors = {"output_ids": ids, "sequence_length": lengths}
        self.responder.send_tensors(tensors, final=final)


def _load_stand_in(name: str, settings: Mapping[str, Any], folder: Path) -> Any:
    """Return a ``TritonPythonModel`` of the installed backend ``tensorrtllm``."""
    from llmserve.errors import PluginError
    from llmserve.plugin import Backend, Registry

    try:
        backend = Registry.load().get(Backend, "tensorrtllm")
    except PluginError as error:
        raise RuntimeError(
            f"there is no stand-in for TensorRT-LLM: {error}; install llmserve-standins"
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
    # The same configuration as an engine's.
    config = {
        "max_batch_size": settings["max_batch_size"],
        "model_transaction_policy": {"decoupled": settings["streams"]},
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        "output": settings["outputs"],
    }
    model = run_path(str(backend.folder / "model.py"))["TritonPythonModel"]()
    model.initialize({"model_name": name, "model_config": json.dumps(config)})
    return model
