"""What is used of vLLM, imported with the settings that this process needs."""

from __future__ import annotations

import os

# The engine computes in this process: Triton's is one per model already, and a second would have
# to be started by an interpreter whose path the first may not know.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Triton's log has the model's warnings and errors; what vLLM tells besides is of no use there.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase

__all__ = [
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "RequestOutputKind",
    "SamplingParams",
    "StatLoggerBase",
    "StructuredOutputsParams",
    "current_platform",
    "tokens_input",
]
