"""The model ``tensorrt_llm`` of the layout ``llmapi``: the LLM API behind the engine's tensors."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.modelconfig import ModelConfig
from llmserve_trtllm.models.common import on_cpu, put_rows
from llmserve_trtllm.models.target import Target
from llmserve_trtllm.tables.row import Row

RUNTIME = "llmserve_trtllm.runtime.llmapi:LlmApi"

_READ = frozenset({
    "input_ids", "input_lengths", "request_output_len", "end_id", "pad_id", "stop_words_list",
    "bad_words_list", "temperature", "runtime_top_k", "runtime_top_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "min_length", "min_tokens", "random_seed", "seed",
    "stop", "streaming", "exclude_input_in_output", "len_penalty", "beam_width",
})  # fmt: skip
_ANSWERED = ("output_ids", "sequence_length")


@dataclass(frozen=True)
class LlmApiTarget(Target):
    """A build for the LLM API, which does a part of what an engine's model does."""

    @property
    def engine_echoes(self) -> bool:
        """The LLM API gives new tokens only."""
        return False

    @property
    def engine_inputs(self) -> list[Row]:
        """What our model around the LLM API reads."""
        return [row for row in super().engine_inputs if row.name in _READ]

    @property
    def engine_outputs(self) -> list[Row]:
        """What it answers."""
        return [row for row in super().engine_outputs if row.name in _ANSWERED]

    @property
    def straight(self) -> list[Row]:
        """Nothing goes by without preprocessing."""
        return []

    @property
    def bias(self) -> list[Row]:
        """The LLM API takes no bias on words."""
        return []

    @property
    def scores(self) -> list[Row]:
        """Nothing is said beside the tokens."""
        return []


def configure_llmapi(config: ModelConfig, target: LlmApiTarget) -> None:
    """Fill in the configuration: requests are handed on at once, for the LLM API batches them."""
    put_rows(config, target.engine_inputs, target.engine_outputs)
    config.model_transaction_policy.decoupled = target.streams
    on_cpu(config)
