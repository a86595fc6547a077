"""What can be said of a build beside the engine's parameters."""

from __future__ import annotations

from llmserve.builtin import DECOUPLED_OPTION
from llmserve.options import INT32_MAX, Option
from llmserve.runtime import contract
from llmserve.runtime.contract import Tensor
from llmserve_trtllm.batching import NO_EVICT, SCHEDULERS
from llmserve_trtllm.parameters import OPTIONS as PARAMETERS

_HONOURED = {
    "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "random_seed", "min_tokens", "ignore_eos", "end_id", "bad_words",
}  # fmt: skip
WISHES: tuple[Tensor, ...] = (
    *(tensor for tensor in contract.SAMPLING if tensor.name in _HONOURED),
    Tensor("min_length", "TYPE_INT32"),
    Tensor("pad_id", "TYPE_INT32"),
    Tensor("length_penalty", "TYPE_FP32"),
    Tensor("beam_width", "TYPE_INT32"),
)
"""What the engine honours of a request."""


def _count(name: str, default: int, text: str, minimum: int = 1) -> Option:
    return Option(name, default, text, minimum=minimum, maximum=INT32_MAX)


_LOGITS = ("TYPE_FP32", "TYPE_FP16", "TYPE_BF16")

_WHAT = (
    Option(
        "layout",
        "engine",
        "engine serves a compiled engine (TensorRT-LLM up to 1.2), llmapi the model as it is, by "
        "NVIDIA's LLM API (1.0 and later).",
        choices=("engine", "llmapi"),
    ),
    Option("engine", "", "Folder of the engine; where build_engine puts it."),
    Option("engine_at", "", "Where the server sees that folder, if not where it lies here."),
    Option(
        "trtllm_version", "", "TensorRT-LLM that will run it; by default the last with engines."
    ),
    Option("container", "", "NVIDIA's container that will run it, such as 24.08."),
    Option(
        "scheduler",
        NO_EVICT,
        "guaranteed_no_evict never pauses a request that has begun, max_utilization packs as many "
        "as fit now; guaranteed_completion is the tutorials' word for the first.",
        choices=SCHEDULERS,
    ),
    DECOUPLED_OPTION,
    Option(
        "stream_through",
        "bls",
        "bls leads a decoupled ensemble to tensorrt_llm_bls, which remembers what it has told; "
        "ensemble wires the three models as NVIDIA does, which splits characters.",
        choices=("bls", "ensemble"),
    ),
    Option("bls", False, "Build tensorrt_llm_bls beside the ensemble in any case."),
    Option("stand_in", False, "With llmapi: PyTorch where TensorRT-LLM is not installed."),
)
_SERVING = (
    _count("preprocessing_instance_count", 1, "Copies of preprocessing."),
    _count("postprocessing_instance_count", 1, "Copies of postprocessing."),
    _count("bls_instance_count", 1, "Copies of tensorrt_llm_bls; each asks for many at a time."),
    _count("max_queue_delay_microseconds", 0, "How long a request may wait for company.", 0),
    _count("max_queue_size", 0, "Most requests that wait; more are refused. 0 is no limit.", 0),
    Option("logits_datatype", "TYPE_FP32", "Type of logits that are asked for.", choices=_LOGITS),
    Option(
        "encoder_input_features_data_type",
        "TYPE_FP16",
        "Type of a tensor that models of text leave out.",
        choices=("TYPE_FP16", "TYPE_BF16"),
    ),
    Option(
        "prompt_embedding_table_data_type",
        "TYPE_FP16",
        "Type of prompt tuning's table.",
        choices=("TYPE_FP16", "TYPE_BF16", "TYPE_FP32"),
    ),
    Option(
        "multi_gpu",
        "leader",
        "How an engine of several processes is started: leader makes a server for each, "
        "orchestrator one that starts the others.",
        choices=("leader", "orchestrator"),
    ),
)
_BUILDING = (
    Option("build_engine", False, "Build the engine first, where TensorRT-LLM is installed."),
    Option(
        "dtype",
        "auto",
        "Type of the weights; auto is float16 in an engine and the model's own with llmapi.",
        choices=("auto", "float16", "bfloat16", "float32"),
    ),
    Option(
        "quantization",
        "",
        "How the engine's weights are made smaller.",
        choices=("", "fp8", "int8", "int4", "int4_awq", "int8_sq"),
    ),
    _count("tensor_parallel", 1, "GPUs that share each layer."),
    _count("pipeline_parallel", 1, "GPUs that share the layers."),
    _count("max_input_len", 0, "Longest prompt; 0 is 1024 in an engine, else what fits.", 0),
    _count("max_seq_len", 0, "Longest prompt and answer; 0 is 2048, or the model's own.", 0),
    Option("examples", "TensorRT-LLM/examples", "Folder of TensorRT-LLM's examples, for building."),
)

OPTIONS: tuple[Option, ...] = (*_WHAT, *_SERVING, *_BUILDING, *PARAMETERS)
