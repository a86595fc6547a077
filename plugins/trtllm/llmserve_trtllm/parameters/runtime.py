"""Parameters of the runtime: what it runs on, what it tells and what it tunes."""

from __future__ import annotations

from llmserve.options import Option
from llmserve_trtllm.parameters.parameter import Parameter, count, share, switch, words

RUNTIME = (
    Parameter(
        Option(
            "exclude_input_in_output",
            True,
            "Whether the engine returns new tokens only; answers are the same either way, and "
            "echo is what puts the prompt before them.",
        ),
        always=True,
        instead="leave it out: its engine always returns the prompt's tokens, and they are cut off",
    ),
    count(
        "max_num_sequences", 0, "Most sequences under way; 0 is unset.", since="0.5", until="0.8"
    ),
    switch(
        "enable_trt_overlap",
        False,
        "Run two halves of a batch in turn.",
        since="0.5",
        until="0.11",
        instead="leave it out: it has had no effect since 0.11",
    ),
    switch("enable_chunked_context", False, "Split long prompts over several steps."),
    words("gpu_device_ids", "GPUs with commas between; semicolons between several instances."),
    words("participant_ids", "MPI ranks with commas between, for orchestrators.", since="0.19"),
    count("num_nodes", 1, "Nodes that the model runs on.", low=1, since="0.19"),
    share("gpu_weights_percent", 1.0, "Share of the weights that stays on the GPU."),
    count("cancellation_check_period_ms", 100, "Milliseconds between looks for cancellations."),
    count("stats_check_period_ms", 100, "Milliseconds between reports of statistics."),
    count("iter_stats_max_iterations", 0, "Iterations whose statistics are kept; 0 is unset."),
    count("request_stats_max_iterations", 0, "The same for each request; 0 is unset."),
    switch("multi_block_mode", True, "Split attention over several blocks of a GPU.", since="0.19"),
    switch(
        "enable_context_fmha_fp32_acc",
        False,
        "Accumulate in float32 in the attention of prompts.",
        since="0.19",
    ),
    switch("cuda_graph_mode", False, "Replay steps as CUDA graphs.", since="0.19"),
    count("cuda_graph_cache_size", 0, "CUDA graphs that are kept.", since="0.19"),
)
