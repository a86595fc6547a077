"""The options of a build, with the versions of TensorRT-LLM that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmserve.plugin import Option, Tensor, Value, contract
from llmserve_trtllm.versions import ALL, LATER, Range, Version, since

_SAMPLING = {
    "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "random_seed", "min_tokens", "ignore_eos", "end_id", "bad_words",
}  # fmt: skip
SAMPLING: tuple[Tensor, ...] = (
    *(tensor for tensor in contract.SAMPLING if tensor.name in _SAMPLING),
    Tensor("min_length", "TYPE_INT32"),
    Tensor("pad_id", "TYPE_INT32"),
    Tensor("length_penalty", "TYPE_FP32"),
    Tensor("beam_width", "TYPE_INT32"),
    *(tensor for tensor in contract.FORMS if tensor.name != "grammar"),
    contract.ADAPTER,
)
"""The request parameters that the engine supports."""

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class BuildOption(Option):
    """An option that may be unset if it has no default: then the backend's own applies.

    ``uses`` says what it is for, if not for all builds: the layouts ``engine`` and ``llmapi``, and
    ``building`` an engine.
    """

    kind: type[Value] | None = None
    """The type of its values, if that is not the type of its default."""
    uses: tuple[str, ...] = ()
    versions: tuple[Range, ...] = ()

    def check(self, value: object) -> Value:
        if value == "" == self.default:
            return ""
        kind = self.kind or type(self.default)
        typed = Option(self.name, kind(), self.help, self.choices, self.minimum, self.maximum)
        is_text = isinstance(value, str) and kind is not str
        return typed.parse(str(value)) if is_text else typed.check(value)

    def exists_in(self, version: Version) -> bool:
        return not self.versions or any(version in versions for versions in self.versions)

    def unused(self, options: Mapping[str, Value], version: Version) -> str:
        """Return why the option has no effect in a build, or an empty string."""
        if options["layout"] == "llmapi":
            if self.uses and "llmapi" not in self.uses:
                return f"the layout llmapi serves a model without an engine and has no {self.name}"
        elif self.uses == ("llmapi",):
            why = ": an engine gets its stand-in without it" if self.name == "stand_in" else ""
            return f"{self.name} is for the layout llmapi{why}"
        elif "building" in self.uses and not options["build_engine"]:
            return f"{self.name} is for building an engine, and this engine already exists"
        elif not self.exists_in(version):
            versions = " or ".join(map(str, self.versions))
            return f"TensorRT-LLM {version} has no {self.name}: it exists {versions}"
        return ""


def _parameter(
    name: str,
    kind: type[Value],
    help: str,
    *,
    default: Value = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    uses: tuple[str, ...] = ("engine",),
    versions: tuple[Range, ...] = (LATER,),
) -> BuildOption:
    """Return an option that becomes a parameter of the engine's model, where 64 bits fit."""
    maximum = _INT64_MAX if kind is int else maximum
    return BuildOption(
        name, default, help, choices, minimum, maximum, kind=kind, uses=uses, versions=versions
    )


BATCH_SIZE = BuildOption(
    "max_batch_size",
    "",
    "Maximum number of requests that the engine runs at once; by default as many as it was built "
    "for, and 16 without an engine. With layout=llmapi, 0 builds a model without a batch "
    "dimension, like NVIDIA's own, whose LLM API runs 16 at once.",
    minimum=0,
    kind=int,
)

_BUILD_OPTIONS = (
    BuildOption(
        "layout",
        "engine",
        "engine serves a compiled engine (TensorRT-LLM up to 1.2), llmapi the model without an "
        "engine, with NVIDIA's LLM API (1.0 and later).",
        choices=("engine", "llmapi"),
    ),
    BuildOption(
        "engine", "", "Folder of the engine; build_engine writes it there.", uses=("engine",)
    ),
    BuildOption(
        "engine_at", "", "Path of that folder on the server, if it differs.", uses=("engine",)
    ),
    BuildOption(
        "trtllm_version",
        "",
        "Version of TensorRT-LLM that will run it; by default the last with engines. Of those "
        "between 0.19 and 1.2, and after 1.2, nothing of NVIDIA's was read.",
    ),
    BuildOption(
        "container",
        "",
        "Container that will run it: the tag of NVIDIA's, such as 25.05, or an image's full name.",
    ),
    BuildOption(
        "scheduler",
        "guaranteed_no_evict",
        "guaranteed_no_evict never pauses a running request, max_utilization packs as many as "
        "fit now; guaranteed_completion is the tutorials' name for the first.",
        choices=("guaranteed_no_evict", "max_utilization", "guaranteed_completion"),
    ),
    BuildOption(
        "decoupled",
        "",
        "Stream pieces as they are generated, over gRPC streams and /generate_stream; /infer "
        "then refuses the model. Defaults to true for in-flight batching from 0.19 on.",
        kind=bool,
    ),
    BuildOption(
        "stream_through",
        "bls",
        "bls connects a decoupled ensemble to tensorrt_llm_bls, which keeps track of what it "
        "has sent; ensemble connects the three models as NVIDIA does, which splits characters.",
        choices=("bls", "ensemble"),
    ),
    BuildOption("bls", False, "Always build tensorrt_llm_bls in addition to the ensemble."),
    BuildOption(
        "stand_in", False, "Use PyTorch where TensorRT-LLM is not installed.", uses=("llmapi",)
    ),
    BuildOption(
        "max_loras",
        8,
        "Most adapters in a step; requests of others wait. Their memory is taken when a model with "
        "adapters is loaded.",
        minimum=1,
        uses=("llmapi",),
    ),
    BuildOption(
        "max_lora_rank",
        0,
        "Highest rank of adapters; 0 is that of those that the model has when it is loaded, and 16 "
        "at least.",
        minimum=0,
        uses=("llmapi",),
    ),
    BuildOption("preprocessing_instance_count", 1, "Instances of preprocessing.", minimum=1),
    BuildOption("postprocessing_instance_count", 1, "Instances of postprocessing.", minimum=1),
    BuildOption(
        "bls_instance_count",
        0,
        "Instances of tensorrt_llm_bls; each answers one request at a time. 0 is as many as "
        "max_batch_size, so that no request waits for one, and at most 64.",
        minimum=0,
    ),
    BuildOption(
        "max_queue_delay_microseconds",
        0,
        "How long a request may wait for others to share a batch.",
        minimum=0,
        versions=(LATER,),
    ),
    BuildOption(
        "max_queue_size",
        0,
        "Maximum number of waiting requests; more are refused. 0 is no limit.",
        minimum=0,
        versions=(LATER,),
    ),
    BuildOption(
        "max_inflight_requests",
        0,
        "Maximum number of requests in each step of the ensemble, which bounds what a fast step "
        "leaves for a slow one; 0 is no limit. For Triton 25.11 or later: the one from PyPI cannot "
        "load such a model.",
        minimum=0,
    ),
    BuildOption(
        "logits_datatype",
        "TYPE_FP32",
        "Type of returned logits; the backend supports no other.",
        choices=("TYPE_FP32", "TYPE_FP16"),
        uses=("engine",),
        versions=(LATER,),
    ),
    BuildOption(
        "encoder_input_features_data_type",
        "TYPE_FP16",
        "Type of a tensor that text models do not use.",
        choices=("TYPE_FP16", "TYPE_BF16"),
        uses=("engine",),
        versions=(LATER,),
    ),
    BuildOption(
        "prompt_embedding_table_data_type",
        "TYPE_FP16",
        "Type of the prompt-tuning table.",
        choices=("TYPE_FP16", "TYPE_BF16", "TYPE_FP32"),
        uses=("engine",),
        versions=(since("1.2"),),
    ),
    BuildOption(
        "multi_gpu",
        "leader",
        "How to start an engine of several processes: leader starts a server for each, "
        "orchestrator one server that starts the others.",
        choices=("leader", "orchestrator"),
        uses=("engine",),
    ),
    BuildOption(
        "build_engine",
        False,
        "Build the engine first, where TensorRT-LLM is installed.",
        uses=("engine",),
    ),
    BuildOption(
        "dtype",
        "auto",
        "Type of the weights; auto is float16 in an engine and the model's own with llmapi.",
        choices=("auto", "float16", "bfloat16", "float32"),
        uses=("building", "llmapi"),
    ),
    BuildOption(
        "quantization",
        "",
        "Quantization of the engine's weights.",
        choices=("fp8", "int8", "int4", "int4_awq", "int8_sq"),
        uses=("building",),
    ),
    BuildOption(
        "tensor_parallel",
        1,
        "Number of GPUs that share each layer.",
        minimum=1,
        uses=("building", "llmapi"),
    ),
    BuildOption(
        "pipeline_parallel",
        1,
        "Number of GPUs that the layers are divided among.",
        minimum=1,
        uses=("building", "llmapi"),
    ),
    BuildOption(
        "max_input_len",
        0,
        "Longest prompt; 0 is 1024 in an engine, otherwise what fits.",
        minimum=0,
        uses=("building", "llmapi"),
    ),
    BuildOption(
        "max_seq_len",
        0,
        "Longest prompt and answer together; 0 is 2048, or the model's own.",
        minimum=0,
        uses=("building", "llmapi"),
    ),
    BuildOption(
        "examples",
        "TensorRT-LLM/examples",
        "Folder of TensorRT-LLM's examples, for building.",
        uses=("building",),
    ),
)

# The parameters of the model tensorrt_llm that text models can use. Only parameters that are set
# are written, so that the backend's own defaults apply, which change from version to version; the
# two with a default here are always written, so that all versions behave the same.
PARAMETERS = (
    _parameter(
        "max_num_sequences",
        int,
        "Maximum number of concurrent sequences.",
        minimum=0,
        versions=(since("0.5", "0.8"),),
    ),
    _parameter(
        "enable_trt_overlap",
        bool,
        "Overlap steps; before 0.11 by running two halves of a batch in turn. Defaults to true "
        "in 0.5.0.",
        versions=(since("0.5", "0.11"), since("1.2")),
    ),
    _parameter(
        "max_tokens_in_paged_kv_cache",
        int,
        "Maximum number of tokens in the KV cache.",
        minimum=0,
        uses=("engine", "llmapi"),
        versions=(ALL,),
    ),
    _parameter(
        "kv_cache_free_gpu_mem_fraction",
        float,
        "Share of the GPU memory left after loading that the KV cache may use.",
        default=0.9,
        minimum=0,
        maximum=1,
        uses=("engine", "llmapi"),
        versions=(ALL,),
    ),
    _parameter(
        "enable_kv_cache_reuse",
        bool,
        "Keep the cache of a prompt for others with the same beginning. The backend's default "
        "is true.",
        uses=("engine", "llmapi"),
    ),
    _parameter(
        "kv_cache_host_memory_bytes", int, "Host memory for offloaded cache blocks.", minimum=0
    ),
    _parameter(
        "kv_cache_onboard_blocks", bool, "Copy offloaded blocks back to the GPU before use."
    ),
    _parameter(
        "max_attention_window_size",
        str,
        "Maximum number of tokens that a token attends to; a comma-separated list is applied to "
        "the layers in turn.",
    ),
    _parameter(
        "sink_token_length",
        int,
        "Number of initial tokens that stay in the attention window.",
        minimum=0,
    ),
    _parameter(
        "exclude_input_in_output",
        bool,
        "Whether the engine returns only new tokens. Answers are the same either way: only a "
        "request's own exclude_input_in_output changes them.",
        default=True,
    ),
    _parameter("enable_chunked_context", bool, "Split long prompts over several steps."),
    _parameter("gpu_device_ids", str, "Comma-separated GPUs; a semicolon starts another instance."),
    _parameter("participant_ids", str, "Comma-separated MPI ranks, for orchestrators."),
    _parameter("num_nodes", int, "Number of nodes that the model runs on.", minimum=1),
    _parameter(
        "gpu_weights_percent",
        float,
        "Share of the weights that stays on the GPU.",
        minimum=0,
        maximum=1,
    ),
    _parameter(
        "cancellation_check_period_ms",
        int,
        "Milliseconds between checks for cancellations.",
        minimum=1,
    ),
    _parameter(
        "stats_check_period_ms", int, "Milliseconds between reports of statistics.", minimum=1
    ),
    _parameter(
        "iter_stats_max_iterations", int, "Number of iterations to keep statistics of.", minimum=0
    ),
    _parameter("request_stats_max_iterations", int, "The same for each request.", minimum=0),
    _parameter("multi_block_mode", bool, "Split attention over several blocks of a GPU."),
    _parameter(
        "enable_context_fmha_fp32_acc", bool, "Accumulate in float32 in the attention over prompts."
    ),
    _parameter("cuda_graph_mode", bool, "Replay steps as CUDA graphs."),
    _parameter("cuda_graph_cache_size", int, "Number of CUDA graphs to keep.", minimum=0),
    _parameter(
        "lora_cache_optimal_adapter_size",
        int,
        "Adapter size that fits a page of the cache.",
        minimum=1,
    ),
    _parameter(
        "lora_cache_max_adapter_size", int, "Largest adapter size that a page must hold.", minimum=1
    ),
    _parameter(
        "lora_cache_gpu_memory_fraction",
        float,
        "Share of the remaining memory for adapters.",
        minimum=0,
        maximum=1,
    ),
    _parameter("lora_cache_host_memory_bytes", int, "Host memory for adapters.", minimum=0),
    _parameter("lora_prefetch_dir", str, "Folder of adapters to load at startup."),
    _parameter(
        "max_beam_width", int, "Maximum number of beams of a request.", minimum=1, versions=(ALL,)
    ),
    _parameter(
        "decoding_mode",
        str,
        "How tokens are chosen; by default it depends on the engine and max_beam_width.",
        choices=(
            "top_k",
            "top_p",
            "top_k_top_p",
            "beam_search",
            "medusa",
            "redrafter",
            "lookahead",
            "eagle",
        ),
    ),
    _parameter("normalize_log_probs", bool, "Whether log-probabilities are normalised."),
    _parameter("medusa_choices", str, "Tree of Medusa's choices, as in {0, 0, 0}, {0, 1}."),
    _parameter("eagle_choices", str, "Tree of Eagle's choices, as in {0, 0, 0}, {0, 1}."),
    _parameter("lookahead_window_size", int, "Window of lookahead decoding.", minimum=1),
    _parameter("lookahead_ngram_size", int, "Length of lookahead decoding's n-grams.", minimum=1),
    _parameter(
        "lookahead_verification_set_size", int, "Number of n-grams to verify at once.", minimum=1
    ),
    _parameter(
        "speculative_decoding_fast_logits",
        bool,
        "Transfer a draft's logits directly between processes.",
    ),
    _parameter(
        "guided_decoding_backend",
        str,
        "Constrains answers to a JSON schema or another form on request.",
        choices=("xgrammar",),
        uses=("engine", "llmapi"),
    ),
    _parameter(
        "xgrammar_tokenizer_info_path",
        str,
        "File that describes the tokenizer to xgrammar; by default written into the engine's "
        "folder.",
    ),
)
OPTIONS = (*_BUILD_OPTIONS, *PARAMETERS)

WRITTEN = (
    (ALL, "FORCE_CPU_ONLY_INPUT_TENSORS", "no"),
    (LATER, "executor_worker_path", "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"),
    (LATER, "tokenizer_dir", ""),
    (LATER, "xgrammar_tokenizer_info_path", ""),
    (LATER, "guided_decoding_backend", ""),
)
"""Parameters that are always written: the versions, the key and the value.

They are those of NVIDIA's templates that Triton reads, and those that the backend reads from 0.19
on without a default (inflight_batcher_llm/src/model_instance_state.cc:413-415 of v0.19.0). Without
them the model does not load; empty means not used.
"""


def engine_parameters(options: Mapping[str, Value], version: Version) -> dict[str, str]:
    written = {key: value for versions, key, value in WRITTEN if version in versions}
    for parameter in PARAMETERS:
        value = options[parameter.name]
        if value != "" and parameter.exists_in(version):
            text = str(value)
            written[parameter.name] = text.lower() if isinstance(value, bool) else text
    return written
