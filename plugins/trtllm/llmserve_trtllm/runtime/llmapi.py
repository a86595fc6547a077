"""The model ``tensorrt_llm`` without an engine: NVIDIA's LLM API behind the engine's tensors."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime.errors import RequestError
from llmserve.runtime.located import located
from llmserve.runtime.protocols import Parts
from llmserve.server.backends.tensorrtllm import Flight, Settings, StandIn, Tokens, read_rows


class LlmApi:
    """Hands requests to ``tensorrt_llm.LLM`` as they come; it is what batches them."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._stand_in: StandIn | None = None

    def start(self, parts: Parts) -> None:
        """Load the model; without TensorRT-LLM only where the build asked for the stand-in."""
        self._pb = parts.pb_utils
        self._shape = self._shape_of(parts.name)
        self._context: int = parts.generator.context_length
        try:
            import tensorrt_llm
        except ImportError:
            if not self._settings["stand_in"]:
                raise RuntimeError(
                    "TensorRT-LLM is not installed here: serve this in NVIDIA's container, or "
                    "build it with --set stand_in=true to try it with PyTorch"
                ) from None
            self._stand_in = StandIn(self._shape, parts.pb_utils)
        else:
            self._llm = self._load(tensorrt_llm)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; the answers leave through their senders."""
        if self._stand_in is not None:
            self._stand_in.execute(requests)
            return
        for raw in requests:
            given = {tensor.name(): tensor.as_numpy() for tensor in raw.inputs()}
            flight = Flight(raw, given, self._shape, self._pb)
            try:
                flight.rows = read_rows(given, self._context, flight.is_cancelled)
            except RequestError as error:
                flight.fail(str(error), internal=False)
                continue
            threading.Thread(target=self._fly, args=(flight,), daemon=True).start()

    def finalize(self) -> None:
        """Let go of the model."""
        if self._stand_in is not None:
            self._stand_in.finalize()
        elif hasattr(self, "_llm"):
            self._llm.shutdown()

    def _fly(self, flight: Flight) -> None:
        """Answer a request: its rows are under way together, and are told one after another."""
        try:
            results = [
                self._llm.generate_async(
                    row.prompt_ids, self._sampling(row), streaming=flight.streams
                )
                for row in flight.rows
            ]
            for row, result in zip(flight.rows, results, strict=True):
                for output in result if flight.streams else [result.result()]:
                    for token in output.outputs[0].token_ids[len(row.token_ids) :]:
                        row.push(token)
                    flight.tell()
                    if row.done:
                        result.abort()
                        break
                row.end()
            flight.tell()
        except Exception as error:
            flight.fail(f"the LLM API failed: {type(error).__name__}: {error}", internal=True)

    @staticmethod
    def _sampling(row: Tokens) -> Any:
        from tensorrt_llm import SamplingParams

        params = row.params
        end = min(row.eos_ids, default=-1)
        greedy = params.heat == 0
        return SamplingParams(
            max_tokens=row.max_tokens,
            end_id=end,
            pad_id=max(end, 0),
            temperature=None if greedy else params.heat,
            top_k=1 if greedy else params.top_k or None,
            top_p=None if greedy else params.top_p,
            seed=params.seed,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_tokens=params.min_tokens or None,
            detokenize=False,
        )

    def _load(self, tensorrt_llm: Any) -> Any:
        from tensorrt_llm.llmapi import CapacitySchedulerPolicy, KvCacheConfig, SchedulerConfig

        given = self._settings
        where, options = located(given, self._folder)
        policy = getattr(CapacitySchedulerPolicy, given["scheduler"])
        return tensorrt_llm.LLM(
            model=where,
            skip_tokenizer_init=True,
            trust_remote_code=options["trust_remote_code"],
            revision=options.get("revision"),
            dtype=given["dtype"],
            tensor_parallel_size=given["tensor_parallel_size"],
            pipeline_parallel_size=given["pipeline_parallel_size"],
            max_batch_size=given["max_batch_size"],
            max_seq_len=self._context,
            scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
            kv_cache_config=KvCacheConfig(
                free_gpu_memory_fraction=given["free_gpu_memory_fraction"],
                enable_block_reuse=given["enable_block_reuse"],
                max_tokens=given["max_tokens"] or None,
            ),
        )

    def _shape_of(self, name: str) -> Settings:
        given = self._settings
        outputs = {key: (kind, tuple(dims)) for key, (kind, dims) in given["outputs"].items()}
        source = {key: given[key] for key in ("id", "revision", "path") if key in given}
        if "path" in source:
            source["path"] = str(self._folder / source["path"])
        return Settings(
            name=name,
            source=source,
            static=given["static"],
            decoupled=given["streams"],
            max_batch_size=given["max_batch_size"],
            excludes_input=True,
            cache_tokens=given["max_tokens"],
            outputs=outputs,
        )
