"""Parameters of the KV cache and of the cache of LoRA adapters."""

from __future__ import annotations

from llmserve.options import Option
from llmserve_trtllm.parameters.parameter import Parameter, count, share, switch, words

CACHE = (
    count(
        "max_tokens_in_paged_kv_cache",
        0,
        "Most tokens in the KV cache; 0 lets kv_cache_free_gpu_mem_fraction alone decide.",
        since="0.5",
    ),
    Parameter(
        Option(
            "kv_cache_free_gpu_mem_fraction",
            0.9,
            "Share of the GPU memory left after loading that the KV cache may take.",
            minimum=0.0,
            maximum=1.0,
        ),
        since="0.5",
        always=True,
    ),
    switch(
        "enable_kv_cache_reuse", False, "Keep the cache of a prompt for those that begin alike."
    ),
    count("kv_cache_host_memory_bytes", 0, "Memory of the host that blocks of the cache move to."),
    switch("kv_cache_onboard_blocks", True, "Bring blocks back from the host before use."),
    count(
        "max_attention_window_size",
        0,
        "Most tokens that a token attends to; 0 is all of its sequence.",
    ),
    count("sink_token_length", 0, "Tokens of the beginning that stay in the attention window."),
)

LORA = (
    count(
        "lora_cache_optimal_adapter_size", 8, "Adapter size that a page of the cache fits.", low=1
    ),
    count(
        "lora_cache_max_adapter_size", 64, "Largest adapter size that a page has to hold.", low=1
    ),
    share("lora_cache_gpu_memory_fraction", 0.05, "Share of the memory left for adapters."),
    count("lora_cache_host_memory_bytes", 1 << 30, "Memory of the host for adapters."),
    words("lora_prefetch_dir", "Folder of adapters to load at the start.", since="0.19"),
)
