"""What a client of the ensemble sends and gets, and the models before and after the engine.

Left out are the tensors of encoder-decoder and multimodal models (``decoder_text_input``,
``prompt_table_extra_id``, images and videos): this plugin serves decoder-only models of text.
"""

from __future__ import annotations

from llmserve_trtllm.tables.engine import PERF_OUTPUTS, SCORE_OUTPUTS
from llmserve_trtllm.tables.row import Row, free, wish

TEXT_0_5 = (
    Row("text_input", "STRING", (-1,)),
    # The templates require these. A request that does not say gets a default here, and words may
    # be left out.
    wish("max_tokens", "UINT32", dims=(-1,)),
    wish("bad_words", "STRING", dims=(-1,)),
    wish("stop_words", "STRING", dims=(-1,)),
)
WISHES_0_5 = (
    wish("end_id", "UINT32"),
    wish("pad_id", "UINT32"),
    wish("top_k", "UINT32"),
    wish("top_p", "FP32"),
    wish("temperature", "FP32"),
    wish("length_penalty", "FP32"),
    wish("repetition_penalty", "FP32"),
    wish("min_length", "UINT32"),
    wish("random_seed", "UINT64"),
    wish("beam_width", "UINT32"),
)
STRAIGHT_0_5 = (
    # Its engine refuses a request that has this one and repetition_penalty, so it only gets it
    # from who sends it.
    wish("presence_penalty", "FP32"),
)
STREAM = wish("stream", "BOOL")

TEXT = (
    Row("text_input", "STRING"),
    wish("max_tokens", "INT32"),
    wish("bad_words", "STRING", dims=(-1,)),
    wish("stop_words", "STRING", dims=(-1,)),
)
WISHES = (
    wish("end_id", "INT32"),
    wish("pad_id", "INT32"),
    wish("top_k", "INT32"),
    wish("top_p", "FP32"),
    wish("temperature", "FP32"),
    wish("length_penalty", "FP32"),
    wish("repetition_penalty", "FP32"),
    wish("min_length", "INT32", until="1.2"),
    wish("min_tokens", "INT32", since="0.20"),
    wish("presence_penalty", "FP32"),
    wish("frequency_penalty", "FP32"),
    wish("random_seed", "UINT64", until="1.2"),
    wish("seed", "UINT64", since="0.20"),
    wish("beam_width", "INT32"),
)
BIAS = (
    wish("embedding_bias_words", "STRING", dims=(-1,)),
    wish("embedding_bias_weights", "FP32", dims=(-1,)),
)
EXCLUDE = wish("exclude_input_in_output", "BOOL")
OURS = (
    wish("messages", "STRING"),
    wish("ignore_eos", "BOOL"),
    EXCLUDE,
    wish("return_num_input_tokens", "BOOL"),
    wish("return_num_output_tokens", "BOOL"),
)
"""What every model of llmserve takes, whether the version's template has it or not."""
STRAIGHT = (
    wish("num_return_sequences", "INT32", since="0.19"),
    wish("return_log_probs", "BOOL"),
    wish("return_context_logits", "BOOL"),
    wish("return_generation_logits", "BOOL"),
    wish("return_perf_metrics", "BOOL", since="0.19"),
    wish("prompt_embedding_table", "FP16", dims=(-1, -1)),
    wish("prompt_vocab_size", "INT32"),
    wish("lora_task_id", "UINT64", since="0.19"),
    free("lora_weights", "FP16", -1, -1, since="0.19"),
    free("lora_config", "INT32", -1, 3, since="0.19"),
    free("guided_decoding_guide_type", "STRING", 1, since="0.19"),
    free("guided_decoding_guide", "STRING", 1, since="0.19"),
)
"""What goes to the engine as it is, under the same name."""

ANSWER_0_5 = (Row("text_output", "STRING", (-1, -1)),)
ANSWER = (Row("text_output", "STRING", (-1,)),)
SCORES = (*SCORE_OUTPUTS, *PERF_OUTPUTS)
"""What the engine says of an answer beside its tokens; it goes straight through."""

READ_0_5 = (
    Row("INPUT_ID", "INT32", (-1,)),
    Row("REQUEST_INPUT_LEN", "INT32"),
    Row("BAD_WORDS_IDS", "INT32", (2, -1)),
    Row("STOP_WORDS_IDS", "INT32", (2, -1)),
    Row("REQUEST_OUTPUT_LEN", "UINT32", (-1,)),
)
READ = (
    Row("INPUT_ID", "INT32", (-1,)),
    Row("REQUEST_INPUT_LEN", "INT32"),
    Row("BAD_WORDS_IDS", "INT32", (2, -1)),
    Row("STOP_WORDS_IDS", "INT32", (2, -1)),
    Row("EMBEDDING_BIAS", "FP32", (-1,)),
    Row("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
)
"""What preprocessing makes of a request, beside a tensor for each wish."""

WRITE_0_5 = (Row("TOKENS_BATCH", "INT32", (-1, -1)),)
WRITE = (Row("TOKENS_BATCH", "INT32", (-1, -1)), Row("SEQUENCE_LENGTH", "INT32", (-1,)))
WRITTEN_0_5 = (Row("OUTPUT", "STRING", (-1, -1)),)
WRITTEN = (Row("OUTPUT", "STRING", (-1,)),)

REQUEST = Row("REQUEST", "STRING")
"""Ours: what postprocessing has to know of a request, as JSON."""

PREPROCESSING_NAMES = {
    "text_input": "QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
}
ENGINE_NAMES = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
"""What the templates call otherwise inside than outside."""


def read_name(client: str) -> str:
    """Return what preprocessing calls a client's tensor."""
    return PREPROCESSING_NAMES.get(client, client.upper())


def made_name(client: str) -> str:
    """Return what preprocessing calls the tensor that it makes of a wish."""
    return f"OUT_{client.upper()}"


def engine_name(client: str) -> str:
    """Return what the engine calls a client's wish."""
    return ENGINE_NAMES.get(client, client)
