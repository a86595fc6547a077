"""What the options of other servers mean here: a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Goal = Literal[
    "source", "file", "name", "option", "engine_arg", "serve", "gateway", "key", "plugin",
    "adapters", "secret", "unneeded", "unmatched",
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """An option of another server, and what it becomes."""

    names: tuple[str, ...]
    goal: Goal
    key: str = ""
    says: str = ""
    """What comes next to it, or why it is not needed."""
    takes: bool = True
    many: bool = False
    """Whether several values may follow."""
    fixed: str = "true"
    """Its value, if none follows."""
    read: Callable[[str], str] = str
    neutral: tuple[str, ...] = ()
    """Values that ask for nothing."""


def source(*names: str) -> Row:
    return Row(names, "source")


def name(*names: str, many: bool = False) -> Row:
    return Row(names, "name", many=many)


def option(
    key: str,
    *names: str,
    says: str = "",
    read: Callable[[str], str] = str,
    neutral: tuple[str, ...] = (),
) -> Row:
    return Row(names, "option", key, says, read=read, neutral=neutral)


def switch(key: str, *names: str, fixed: str = "true", says: str = "") -> Row:
    """An option that is turned on or off, and takes no value."""
    return Row(names, "option", key, says, takes=False, fixed=fixed)


def serve(key: str, *names: str) -> Row:
    return Row(names, "serve", key)


def gateway(key: str, *names: str) -> Row:
    return Row(names, "gateway", key)


def key(*names: str, many: bool = False) -> Row:
    return Row(names, "key", many=many)


def unneeded(says: str, *names: str, takes: bool = True, neutral: tuple[str, ...] = ()) -> Row:
    return Row(names, "unneeded", says=says, takes=takes, neutral=neutral)


def unmatched(says: str, *names: str, takes: bool = True, many: bool = False) -> Row:
    return Row(names, "unmatched", says=says, takes=takes, many=many)


def engine_args(*names: str, takes: bool = True, many: bool = False) -> list[Row]:
    """Arguments of vLLM's engine that have no option of their own; a short name may follow one."""
    rows = []
    for each in names:
        long, _, short = each.partition(" ")
        spellings = (f"--{long}", short) if short else (f"--{long}",)
        key = long.replace("-", "_")
        rows.append(Row(spellings, "engine_arg", key, takes=takes, many=many))
    return rows


def one_of(values: Mapping[str, str]) -> Callable[[str], str]:
    """Return what replaces a value by ours, if it is called otherwise here."""
    return lambda text: values.get(text.lower(), text)


DTYPES = one_of({"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16"})
TEMPLATE = "put it into the model's folder as chat_template.jinja"
TOOLS = "the gateway knows the format of tool calls by the chat template"
THINKING = "the gateway knows the format of thinking by the chat template"
TLS = "llmserve gateway --tls-cert FILE --tls-key FILE, or a proxy"
CORS = "set LLMSERVE_CORS_ORIGIN"
LOGS = "llmserve serve writes a log of its own; --log names its file"
CACHE = "set HF_HOME to where models are downloaded"
CONTEXT = "the model's own context is served, and max_tokens limits an answer"
MEMORY = "weights and cache take what they need"
REQUEST = "a field of each request"
LIMITS = "llmserve gateway --max-requests N --max-queue N"
TASKS = {
    "embed": "embed", "embedding": "embed", "pooling": "embed", "score": "rerank",
    "reward": "classify", "classify": "classify", "generate": "", "auto": "",
}  # fmt: skip
PICTURES = "only text is served"
DISTRIBUTED = "a model is in one machine here"
CODE = "code of others is a plugin here: llmserve new"
FASTER = "how it computes is the plugin's own affair"

KSERVE: tuple[Row, ...] = (
    source("--model-id", "--model-dir"),
    name("--model-name"),
    option("revision", "--model-revision"),
    option("max_model_len", "--max-length", says=CONTEXT),
    gateway("port", "--http-port"),
    Row(("--task",), "plugin", read=one_of({
        "text_generation": "", "text_embedding": "embed", "sequence_classification": "classify",
    })),
    unneeded("the plugin chooses", "--backend", "--workers", "--grpc-port"),
    unneeded(LOGS, "--disable-log-requests", takes=False),
)  # fmt: skip

TGI: tuple[Row, ...] = (
    source("--model-id"),
    option("revision", "--revision"),
    name("--served-model-name"),
    option("tensor_parallel_size", "--num-shard", neutral=("1",)),
    unneeded("num_shard says how many GPUs", "--sharded"),
    option(
        "quantization", "--quantize", read=one_of({"bitsandbytes-nf4": "bitsandbytes"}),
        neutral=("gptq", "awq", "marlin", "exl2", "compressed-tensors"),
        says="it is read from the model; int8 is openvino's weight_format",
    ),
    option("dtype", "--dtype", read=DTYPES),
    option("kv_cache_dtype", "--kv-cache-dtype", neutral=("auto",)),
    switch("trust_remote_code", "--trust-remote-code"),
    option("max_model_len", "--max-total-tokens", says=CONTEXT),
    unneeded("a prompt may take the whole context", "--max-input-tokens", "--max-input-length"),
    option("max_num_seqs", "--max-batch-size", says=LIMITS),
    option("prefill_chunk", "--max-batch-prefill-tokens", says=FASTER),
    option("gpu_memory_utilization", "--cuda-memory-fraction", says=MEMORY),
    option("prompt_lookup", "--speculate", says="build --set prompt_lookup=N, if the plugin can"),
    unmatched(LIMITS, "--max-concurrent-requests"),
    unneeded("the gateway bounds it itself", "--max-best-of", "--max-stop-sequences",
             "--max-top-n-tokens", "--max-client-batch-size", "--payload-limit",
             "--validation-workers", "--waiting-served-ratio", "--max-waiting-tokens",
             "--max-batch-total-tokens", "--cuda-graphs", "--shard-uds-path", "--master-addr",
             "--master-port", "--watermark-gamma", "--watermark-delta", "--usage-stats"),
    unneeded(FASTER, "--disable-custom-kernels", "--disable-grammar-support",
             "--enable-prefill-logprobs", takes=False),
    gateway("port", "--port", "-p"),
    serve("host", "--hostname"),
    serve("otlp_endpoint", "--otlp-endpoint"),
    serve("grace", "--graceful-termination-timeout", "-g"),
    key("--api-key"),
    unmatched("Triton's metrics are on the port that serve prints; the gateway's at /metrics",
              "--prometheus-port"),
    unneeded(CACHE, "--huggingface-hub-cache", "--weights-cache-override"),
    unneeded(LOGS, "--json-output", "--env", "-e", takes=False),
    unneeded(LOGS, "--otlp-service-name"),
    unmatched(CORS, "--cors-allow-origin"),
    unmatched("a context longer than the model's own is not served", "--rope-scaling",
              "--rope-factor"),
    unmatched("put tokenizer_config.json into the model's folder", "--tokenizer-config-path"),
    unmatched("a tunnel is no part of it", "--ngrok-authtoken", "--ngrok-edge"),
    unmatched("a tunnel is no part of it", "--ngrok", takes=False),
    Row(("--lora-adapters",), "adapters"),
)  # fmt: skip

TRTLLM: tuple[Row, ...] = (
    source("--model"),
    name("--served-model-name"),
    unmatched("the tokenizer is that of the model", "--tokenizer", "--custom-tokenizer"),
    unneeded("llmserve builds from the checkpoint", "--backend"),
    option("max_num_seqs", "--max-batch-size", says=LIMITS),
    option("max_model_len", "--max-seq-len", says=CONTEXT),
    option("prefill_chunk", "--max-num-tokens", says=FASTER),
    option("tensor_parallel_size", "--tp-size", "--tensor-parallel-size", neutral=("1",)),
    option("gpu_memory_utilization", "--kv-cache-free-gpu-memory-fraction",
           "--free-gpu-memory-fraction", says="it is a share of what is free there, and of all "
           "memory in vLLM"),
    option("kv_cache_dtype", "--kv-cache-dtype", neutral=("auto",)),
    option("max_beam_width", "--max-beam-width", neutral=("1",), says="beams are a request's own"),
    switch("trust_remote_code", "--trust-remote-code"),
    option("revision", "--hf-revision", "--revision"),
    gateway("port", "--port"),
    serve("host", "--host"),
    serve("otlp_endpoint", "--otlp-traces-endpoint"),
    unneeded(THINKING, "--reasoning-parser"),
    unneeded(TOOLS, "--tool-parser"),
    unneeded(LOGS, "--log-level"),
    unmatched(TEMPLATE, "--chat-template"),
    unmatched(DISTRIBUTED, "--pp-size", "--pipeline-parallel-size", "--cp-size",
              "--context-parallel-size", "--ep-size", "--moe-expert-parallel-size",
              "--cluster-size", "--moe-cluster-parallel-size", "--gpus-per-node",
              "--moe-cluster-size", "--metadata-server-config-file", "--server-role",
              "--disagg-cluster-uri"),
    unmatched(CODE, "--custom-module-dirs"),
    unmatched(PICTURES, "--media-io-kwargs"),
    unneeded("one gateway is enough", "--num-postprocess-workers"),
    switch("enable_chunked_prefill", "--enable-chunked-prefill", says="long prompts are always "
           "computed in pieces"),
    unneeded("a prompt that does not fit is refused by itself",
             "--fail-fast-on-attention-window-too-large", takes=False),
    unmatched("it is another file and was not read: adopt its values by hand",
              "--extra-llm-api-options", "--config"),
)  # fmt: skip

OVMS: tuple[Row, ...] = (
    source("--source-model", "--model-path"),
    name("--model-name"),
    gateway("port", "--rest-port"),
    unmatched("Triton's gRPC port has another protocol: [serve] grpc_port", "--port"),
    serve("host", "--rest-bind-address"),
    unneeded("one address is for all", "--grpc-bind-address"),
    Row(("--task",), "plugin", read=one_of({
        "text_generation": "", "embeddings": "embed", "rerank": "rerank",
    })),
    Row(("--target-device",), "unneeded", says="the plugin openvino computes on a CPU",
        neutral=("CPU",)),
    option("weight_format", "--weight-format", says="the checkpoint's own weights are served"),
    option("cache_gb", "--cache-size", says=MEMORY, neutral=("0",)),
    option("max_num_seqs", "--max-num-seqs", says=LIMITS),
    option("prefill_chunk", "--max-num-batched-tokens", says=FASTER),
    option("kv_cache", "--kv-cache-precision"),
    option("draft_model", "--draft-source-model"),
    option("pooling", "--pooling"),
    option("normalize", "--normalize"),
    unneeded(TOOLS, "--tool-parser", "--enable-tool-guided-generation"),
    unneeded(THINKING, "--reasoning-parser"),
    unneeded("the store of models is llmserve's own", "--model-repository-path", "--config-path",
             "--pipeline-type", "--dynamic-split-fuse", "--enable-prefix-caching",
             "--file-system-poll-wait-seconds", "--rest-workers", "--grpc-workers", "--nireq"),
    unmatched("options of OpenVINO itself are not set", "--plugin-config"),
    unneeded(LOGS, "--log-level", "--log-path"),
    unneeded("a build downloads what is missing", "--pull", takes=False),
)  # fmt: skip

TRITON: tuple[Row, ...] = (
    source("--model-repository", "--model-store"),
    serve("http_port", "--http-port"),
    serve("grpc_port", "--grpc-port"),
    serve("metrics_port", "--metrics-port"),
    serve("grace", "--exit-timeout-secs"),
    serve("log_file", "--log-file"),
    unmatched("[serve] open_triton and host", "--http-address", "--grpc-address"),
    unneeded("models are always loaded one by one", "--model-control-mode", "--load-model",
             "--exit-on-error", "--strict-readiness", "--strict-model-config",
             "--disable-auto-complete-config", "--repository-poll-secs"),
    unneeded(LOGS, "--log-verbose", "--log-info", "--log-error", "--log-warning"),
    unmatched("llmserve serve --triton-flag NAME=VALUE takes it", "--backend-config",
              "--pinned-memory-pool-byte-size", "--cuda-memory-pool-byte-size",
              "--backend-directory", "--rate-limit", "--cache-config", "--trace-config",
              "--allow-http", "--allow-grpc", "--allow-metrics"),
)  # fmt: skip
