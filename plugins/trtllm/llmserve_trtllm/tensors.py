"""Every tensor of NVIDIA's templates for text models, and the versions that have it.

Encoder-decoder and multimodal models are left out, except for the engine's own tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from llmserve.plugin import Tensor
from llmserve_trtllm.versions import (
    ALL,
    FIRST_ADAPTERS,
    FIRST_IMAGES,
    LATER,
    ONLY_0_5,
    Range,
    since,
)

BOOL = "TYPE_BOOL"
FP16 = "TYPE_FP16"
FP32 = "TYPE_FP32"
INT32 = "TYPE_INT32"
INT64 = "TYPE_INT64"
STRING = "TYPE_STRING"
UINT32 = "TYPE_UINT32"
UINT64 = "TYPE_UINT64"
UINT8 = "TYPE_UINT8"


@dataclass(frozen=True)
class Row(Tensor):
    """A tensor as a template declares it; the backend sees only the batch dimension of a scalar.

    A ``data_type`` in lower case is the name of the option that holds the type. ``only`` is the
    kind of build that has the tensor: with the layout ``engine`` (the LLM API has no counterpart)
    or ``llmapi``, ``guided`` with a guided_decoding_backend, ``stream`` if the engine is decoupled,
    ``whole`` if it is not, ``images`` if the model reads them.
    """

    optional: bool = False
    scalar: bool = False
    only: str = ""
    versions: Range = ALL

    def __post_init__(self) -> None:
        """Accept every Triton type, unlike ``Tensor``, which accepts only types that Python has."""


_old = partial(Row, optional=True, versions=ONLY_0_5)
_later = partial(Row, optional=True, versions=LATER)
_engine_only = partial(_later, only="engine")
# A name, which NVIDIA's model has as lora_id, lora_name and lora_path: no client names a path here.
_adapter = partial(
    Row, data_type=STRING, optional=True, only="llmapi", versions=since(str(FIRST_ADAPTERS))
)
# As NVIDIA's own model has it from some release after 1.2 on.
_images = partial(
    Row, data_type=STRING, dims=(-1,), only="images", versions=since(str(FIRST_IMAGES))
)
_score = partial(Row, only="engine", versions=LATER)

ENGINE_INPUTS = (
    Row("input_ids", INT32, (-1,), only="engine", versions=ONLY_0_5),
    _later("input_ids", INT32, (-1,), ragged=True),
    _engine_only(
        "encoder_input_features", "encoder_input_features_data_type", (-1, -1), ragged=True
    ),
    _engine_only("encoder_output_lengths", INT32, scalar=True),
    Row("input_lengths", INT32, scalar=True),
    Row("request_output_len", UINT32, only="engine", versions=ONLY_0_5),
    Row("request_output_len", INT32, scalar=True, versions=LATER),
    _engine_only("num_return_sequences", INT32, scalar=True),
    _engine_only("draft_input_ids", INT32, (-1,), ragged=True),
    _engine_only("decoder_input_ids", INT32, (-1,), ragged=True),
    _engine_only("decoder_input_lengths", INT32, scalar=True),
    _engine_only("draft_logits", "logits_datatype", (-1, -1), ragged=True),
    _engine_only("draft_acceptance_threshold", FP32, scalar=True),
    _old("end_id", UINT32, scalar=True),
    _later("end_id", INT32, scalar=True),
    _old("pad_id", UINT32, scalar=True),
    _later("pad_id", INT32, scalar=True),
    _later("stop_words_list", INT32, (2, -1), ragged=True),
    _later("bad_words_list", INT32, (2, -1), ragged=True),
    _engine_only("embedding_bias", FP32, (-1,), ragged=True),
    _old("beam_width", UINT32, scalar=True),
    _later("beam_width", INT32, scalar=True),
    Row("temperature", FP32, optional=True, scalar=True),
    _old("runtime_top_k", UINT32, scalar=True),
    _later("runtime_top_k", INT32, scalar=True),
    Row("runtime_top_p", FP32, optional=True, scalar=True),
    _engine_only("runtime_top_p_min", FP32, scalar=True),
    _engine_only("runtime_top_p_decay", FP32, scalar=True),
    _engine_only("runtime_top_p_reset_ids", INT32, scalar=True),
    Row("len_penalty", FP32, optional=True, scalar=True),
    _engine_only("early_stopping", BOOL, scalar=True),
    Row("repetition_penalty", FP32, optional=True, scalar=True),
    _old("min_length", UINT32, scalar=True),
    Row("min_length", INT32, optional=True, scalar=True, versions=since("0.19", "1.2")),
    Row("min_tokens", INT32, optional=True, scalar=True, versions=since("0.20")),
    _engine_only("beam_search_diversity_rate", FP32, scalar=True),
    Row("presence_penalty", FP32, optional=True, scalar=True),
    _later("frequency_penalty", FP32, scalar=True),
    Row(
        "random_seed",
        UINT64,
        optional=True,
        scalar=True,
        only="engine",
        versions=since("0.5", "0.20"),
    ),
    Row("seed", UINT64, optional=True, scalar=True, versions=since("0.20")),
    _engine_only("return_log_probs", BOOL, scalar=True),
    _engine_only("return_context_logits", BOOL, scalar=True),
    _engine_only("return_generation_logits", BOOL, scalar=True),
    _engine_only("return_perf_metrics", BOOL, scalar=True),
    Row(
        "return_num_input_tokens",
        BOOL,
        optional=True,
        scalar=True,
        only="engine",
        versions=since("1.2"),
    ),
    Row(
        "return_num_output_tokens",
        BOOL,
        optional=True,
        scalar=True,
        only="engine",
        versions=since("1.2"),
    ),
    _later("exclude_input_in_output", BOOL, scalar=True),
    _old("stop", BOOL),
    _later("stop", BOOL, scalar=True),
    _old("streaming", BOOL),
    _later("streaming", BOOL, scalar=True),
    _engine_only(
        "prompt_embedding_table", "prompt_embedding_table_data_type", (-1, -1), ragged=True
    ),
    _engine_only("prompt_table_extra_ids", UINT64, (-1,), ragged=True),
    _engine_only("prompt_vocab_size", INT32, scalar=True),
    _engine_only("cross_attention_mask", BOOL, (-1, -1), ragged=True),
    _engine_only("mrope_rotary_cos_sin", FP32, (-1,)),
    _engine_only("mrope_position_deltas", INT64),
    _engine_only("lora_task_id", UINT64, scalar=True),
    _engine_only("lora_weights", FP16, (-1, -1), ragged=True),
    _engine_only("lora_config", INT32, (-1, 3), ragged=True),
    _engine_only("context_phase_params", UINT8, (-1,), ragged=True),
    _engine_only("skip_cross_attn_blocks", BOOL, ragged=True),
    _engine_only("retention_token_range_starts", INT32, (-1,), ragged=True),
    _engine_only("retention_token_range_ends", INT32, (-1,), ragged=True),
    _engine_only("retention_token_range_priorities", INT32, (-1,), ragged=True),
    _engine_only("retention_token_range_durations_ms", INT32, (-1,), ragged=True),
    _engine_only("retention_decode_priority", INT32, ragged=True),
    _engine_only("retention_decode_duration_ms", INT32, ragged=True),
    _later("guided_decoding_guide_type", STRING, ragged=True),
    _later("guided_decoding_guide", STRING, ragged=True),
    _engine_only("lookahead_window_size", INT32, ragged=True),
    _engine_only("lookahead_ngram_size", INT32, ragged=True),
    _engine_only("lookahead_verification_set_size", INT32, ragged=True),
    _adapter("adapter"),
    _images("image_url", optional=True, ragged=True),
)

ENGINE_OUTPUTS = (
    Row("output_ids", INT32, (-1, -1)),
    Row("sequence_length", INT32, (-1,), versions=LATER),
    Row("context_phase_params", UINT8, (-1,), only="engine", versions=LATER),
)

# The engine's outputs besides the tokens; they reach the client unchanged.
SCORES = (
    _score("cum_log_probs", FP32, (-1,)),
    _score("output_log_probs", FP32, (-1, -1)),
    _score("context_logits", "logits_datatype", (-1, -1)),
    _score("generation_logits", "logits_datatype", (-1, -1, -1)),
    _score("batch_index", INT32),
    _score("sequence_index", INT32),
    _score("kv_cache_alloc_new_blocks", INT32),
    _score("kv_cache_reused_blocks", INT32),
    _score("kv_cache_alloc_total_blocks", INT32),
    _score("arrival_time_ns", INT64),
    _score("first_scheduled_time_ns", INT64),
    _score("first_token_time_ns", INT64),
    _score("last_token_time_ns", INT64),
    _score("acceptance_rate", FP32),
    _score("total_accepted_draft_tokens", INT32),
    _score("total_draft_tokens", INT32),
    Row("num_input_tokens", INT32, only="engine", versions=since("1.2")),
    Row("num_output_tokens", INT32, only="engine", versions=since("1.2")),
)

# The templates require max_tokens, and in 0.5.0 also the words; here each has a default.
CLIENT_TEXT = (
    Row("text_input", STRING, (-1,), versions=ONLY_0_5),
    Row("text_input", STRING, versions=LATER),
    _old("max_tokens", UINT32, (-1,)),
    _later("max_tokens", INT32),
    Row("bad_words", STRING, (-1,), optional=True),
    Row("stop_words", STRING, (-1,), optional=True),
)

# Parameters that preprocessing checks and passes on, each as its own tensor.
CLIENT_SAMPLING = (
    _old("end_id", UINT32),
    _later("end_id", INT32),
    _old("pad_id", UINT32),
    _later("pad_id", INT32),
    _old("top_k", UINT32),
    _later("top_k", INT32),
    Row("top_p", FP32, optional=True),
    Row("temperature", FP32, optional=True),
    Row("length_penalty", FP32, optional=True),
    Row("repetition_penalty", FP32, optional=True),
    _old("min_length", UINT32),
    Row("min_length", INT32, optional=True, versions=since("0.19", "1.2")),
    Row("min_tokens", INT32, optional=True, versions=since("0.20")),
    _later("presence_penalty", FP32),
    _later("frequency_penalty", FP32),
    Row("random_seed", UINT64, optional=True, versions=since("0.5", "0.20")),
    Row("seed", UINT64, optional=True, versions=since("0.20")),
    _old("beam_width", UINT32),
    _later("beam_width", INT32),
    _later("guided_decoding_guide_type", STRING, ragged=True),
    _later("guided_decoding_guide", STRING, ragged=True),
)

CLIENT_BIAS = (
    _engine_only("embedding_bias_words", STRING, (-1,)),
    _engine_only("embedding_bias_weights", FP32, (-1,)),
)

# Inputs that every model of llmserve accepts, whether the template has them or not.
CLIENT_LLMSERVE = (
    Row("messages", STRING, optional=True),
    Row("chat_template_kwargs", STRING, optional=True),
    Row("input_ids", INT32, (-1,), optional=True, ragged=True),
    Row("prompt_only", BOOL, optional=True),
    Row("ignore_eos", BOOL, optional=True),
    Row("exclude_input_in_output", BOOL, optional=True),
    Row("return_num_input_tokens", BOOL, optional=True),
    Row("return_num_output_tokens", BOOL, optional=True),
    Row("stream", BOOL, optional=True),
    # Preprocessing refuses it there: see refusals.py.
    _old("presence_penalty", FP32),
    _later("json_schema", STRING, only="guided"),
    _later("json_object", BOOL, only="guided"),
    _later("choice", STRING, (-1,), ragged=True, only="guided"),
    _later("regex", STRING, only="guided"),
    _adapter("adapter"),
    _images("image_url", optional=True, ragged=True),
)

# Inputs that are sent to the engine unchanged.
CLIENT_DIRECT = (
    _later("num_return_sequences", INT32),
    _later("return_log_probs", BOOL),
    _later("return_context_logits", BOOL),
    _later("return_generation_logits", BOOL),
    _later("return_perf_metrics", BOOL),
    _later("prompt_embedding_table", "prompt_embedding_table_data_type", (-1, -1)),
    _later("prompt_vocab_size", INT32),
    _later("lora_task_id", UINT64),
    _later("lora_weights", FP16, (-1, -1), ragged=True),
    _later("lora_config", INT32, (-1, 3), ragged=True),
)

# The names in NVIDIA's own model for the LLM API, which are synonyms of other names.
CLIENT_LLMAPI = (
    Row("streaming", BOOL, optional=True, only="llmapi", versions=since("1.0")),
    Row("sampling_param_temperature", FP32, optional=True, only="llmapi", versions=since("1.0")),
    Row("sampling_param_top_k", INT32, optional=True, only="llmapi", versions=since("1.0")),
    Row("sampling_param_top_p", FP32, optional=True, only="llmapi", versions=since("1.0")),
    Row(
        "sampling_param_frequency_penalty",
        FP32,
        optional=True,
        only="llmapi",
        versions=since("1.0"),
    ),
    Row(
        "sampling_param_presence_penalty", FP32, optional=True, only="llmapi", versions=since("1.0")
    ),
    Row("sampling_param_max_tokens", INT32, optional=True, only="llmapi", versions=since("1.0")),
    Row("sampling_param_stop", STRING, (-1,), optional=True, only="llmapi", versions=since("1.0")),
    Row("sampling_param_seed", UINT64, optional=True, only="llmapi", versions=since("1.0")),
    Row(
        "sampling_param_exclude_input_from_output",
        BOOL,
        optional=True,
        only="llmapi",
        versions=since("1.0"),
    ),
)

CLIENT_OUTPUTS = (
    Row("text_output", STRING, (-1, -1), versions=ONLY_0_5),
    Row("text_output", STRING, (-1,), versions=LATER),
)

PREPROCESSING_OUTPUTS = (
    Row("INPUT_ID", INT32, (-1,)),
    Row("REQUEST_INPUT_LEN", INT32),
    Row("BAD_WORDS_IDS", INT32, (2, -1)),
    Row("STOP_WORDS_IDS", INT32, (2, -1)),
    Row("EMBEDDING_BIAS", FP32, (-1,), versions=LATER),
    Row("REQUEST_OUTPUT_LEN", UINT32, (-1,), versions=ONLY_0_5),
    Row("REQUEST_OUTPUT_LEN", INT32, (-1,), versions=LATER),
    # For the prompt of an encoder-decoder model; NVIDIA's own clients read them for every model.
    Row("DECODER_INPUT_ID", INT32, (-1,), versions=LATER),
    Row("REQUEST_DECODER_INPUT_LEN", INT32, versions=LATER),
)

# Further information about a request: for a decoupled engine, as only that can act on it, or for
# postprocessing, as JSON. A client that calls postprocessing without it, as NVIDIA's own clients
# do, gets only the text of the tokens.
PREPROCESSING_EXTRA_OUTPUTS = (
    Row("OUT_EXCLUDE_INPUT_IN_OUTPUT", BOOL, only="stream", versions=LATER),
    Row("OUT_STREAM", BOOL, only="stream"),
    Row("REQUEST", STRING, only="whole"),
    _adapter("OUT_ADAPTER", optional=False),
    _images("OUT_IMAGE_URL"),
)

POSTPROCESSING_INPUTS = (
    Row("TOKENS_BATCH", INT32, (-1, -1)),
    Row("SEQUENCE_LENGTH", INT32, (-1,), versions=LATER),
    Row("REQUEST", STRING, optional=True, only="whole"),
)

POSTPROCESSING_OUTPUTS = (
    Row("OUTPUT", STRING, (-1, -1), versions=ONLY_0_5),
    Row("OUTPUT", STRING, (-1,), versions=LATER),
)

# Preprocessing's name of a client's tensor in upper case.
PREPROCESSING_NAMES = {
    "TEXT_INPUT": "QUERY",
    "MAX_TOKENS": "REQUEST_OUTPUT_LEN",
    "BAD_WORDS": "BAD_WORDS_DICT",
    "STOP_WORDS": "STOP_WORDS_DICT",
}

# The contract's name of a tensor of NVIDIA's model for the LLM API.
CONTRACT_NAMES = {
    "streaming": "stream",
    "sampling_param_temperature": "temperature",
    "sampling_param_top_k": "top_k",
    "sampling_param_top_p": "top_p",
    "sampling_param_frequency_penalty": "frequency_penalty",
    "sampling_param_presence_penalty": "presence_penalty",
    "sampling_param_max_tokens": "max_tokens",
    "sampling_param_stop": "stop_words",
    "sampling_param_seed": "seed",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
}

# The ensemble's names of wires.
WIRE_NAMES = {
    "_OUT_END_ID": "_PREPROCESSOR_END_ID",
    "_OUT_PAD_ID": "_PREPROCESSOR_PAD_ID",
}

# The engine's names of preprocessing's outputs; a client's parameter NAME is passed on as OUT_NAME.
ENGINE_NAMES = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_TOP_K": "runtime_top_k",
    "OUT_TOP_P": "runtime_top_p",
    "OUT_TEMPERATURE": "temperature",
    "OUT_LENGTH_PENALTY": "len_penalty",
    "OUT_REPETITION_PENALTY": "repetition_penalty",
    "OUT_MIN_LENGTH": "min_length",
    "OUT_MIN_TOKENS": "min_tokens",
    "OUT_PRESENCE_PENALTY": "presence_penalty",
    "OUT_FREQUENCY_PENALTY": "frequency_penalty",
    "OUT_RANDOM_SEED": "random_seed",
    "OUT_SEED": "seed",
    "OUT_BEAM_WIDTH": "beam_width",
    "OUT_GUIDED_DECODING_GUIDE_TYPE": "guided_decoding_guide_type",
    "OUT_GUIDED_DECODING_GUIDE": "guided_decoding_guide",
    "OUT_STREAM": "streaming",
    "OUT_ADAPTER": "adapter",
    "OUT_IMAGE_URL": "image_url",
    "OUT_EXCLUDE_INPUT_IN_OUTPUT": "exclude_input_in_output",
}
