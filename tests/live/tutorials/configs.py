"""The configurations of the tutorials' models; ``FOLDER`` stands for that of the model."""

from __future__ import annotations

_PYTHON = """
backend: "python"
instance_group { kind: KIND_CPU count: 1 }
parameters { key: "model" value { string_value: "FOLDER" } }
"""

CONFIGS = {
    "iterative": f"""{_PYTHON}
max_batch_size: 8
model_transaction_policy {{ decoupled: true }}
input {{ name: "text_input" data_type: TYPE_STRING dims: [1] }}
output {{ name: "text_output" data_type: TYPE_STRING dims: [1] }}
sequence_batching {{
  iterative_sequence: true
  max_sequence_idle_microseconds: 400000000
  oldest {{ max_candidate_sequences: 64 }}
  control_input {{
    name: "START"
    control {{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }}
  }}
  control_input {{
    name: "CORRID"
    control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }}
  }}
}}
""",
    "llama_python": f"""{_PYTHON}
input {{ name: "text_input" data_type: TYPE_STRING dims: [-1] }}
input {{ name: "max_tokens" data_type: TYPE_UINT32 dims: [-1] }}
output {{ name: "text_output" data_type: TYPE_STRING dims: [-1] }}
""",
    "falcon": f"""{_PYTHON}
max_batch_size: 8
dynamic_batching {{ }}
parameters {{ key: "max_output_length" value {{ string_value: "15" }} }}
input {{ name: "text_input" data_type: TYPE_STRING dims: [1] }}
output {{ name: "text_output" data_type: TYPE_STRING dims: [-1] }}
""",
    "tokenizer": f"""{_PYTHON}
max_batch_size: 4
input {{ name: "INPUT" data_type: TYPE_STRING dims: [1] }}
output {{ name: "IDS" data_type: TYPE_INT64 dims: [-1] }}
sequence_batching {{ oldest {{ max_candidate_sequences: 64 }} }}
""",
    "generator": f"""{_PYTHON}
max_batch_size: 16
input {{ name: "IDS" data_type: TYPE_INT64 dims: [-1] }}
output {{ name: "LOGITS" data_type: TYPE_FP32 dims: [-1, -1] }}
dynamic_batching {{ }}
""",
    "detokenizer": f"""{_PYTHON}
max_batch_size: 16
input {{ name: "LOGITS" data_type: TYPE_FP32 dims: [-1, -1] }}
output {{ name: "TEXT" data_type: TYPE_STRING dims: [-1] }}
dynamic_batching {{ }}
""",
    "sequence": """
platform: "ensemble"
max_batch_size: 4
input { name: "INPUT" data_type: TYPE_STRING dims: [1] }
output { name: "TEXT" data_type: TYPE_STRING dims: [-1] }
ensemble_scheduling {
  step {
    model_name: "tokenizer" model_version: -1
    input_map { key: "INPUT" value: "INPUT" } output_map { key: "IDS" value: "ids" }
  }
  step {
    model_name: "generator" model_version: -1
    input_map { key: "IDS" value: "ids" } output_map { key: "LOGITS" value: "logits" }
  }
  step {
    model_name: "detokenizer" model_version: -1
    input_map { key: "LOGITS" value: "logits" } output_map { key: "TEXT" value: "TEXT" }
  }
}
""",
    "preprocessing": f"""{_PYTHON}
max_batch_size: 128
input {{ name: "QUERY" data_type: TYPE_STRING dims: [-1] }}
input {{ name: "BAD_WORDS_DICT" data_type: TYPE_STRING dims: [-1] }}
input {{ name: "STOP_WORDS_DICT" data_type: TYPE_STRING dims: [-1] }}
input {{ name: "REQUEST_OUTPUT_LEN" data_type: TYPE_UINT32 dims: [-1] }}
output {{ name: "INPUT_ID" data_type: TYPE_INT32 dims: [-1] }}
output {{ name: "REQUEST_INPUT_LEN" data_type: TYPE_INT32 dims: [1] }}
output {{ name: "STOP_WORDS_IDS" data_type: TYPE_INT32 dims: [2, -1] }}
output {{ name: "REQUEST_OUTPUT_LEN" data_type: TYPE_UINT32 dims: [-1] }}
""",
    "tensorrt_llm": """
backend: "tensorrtllm"
max_batch_size: 128
instance_group { kind: KIND_CPU count: 1 }
input { name: "input_ids" data_type: TYPE_INT32 dims: [-1] }
input { name: "input_lengths" data_type: TYPE_INT32 dims: [1] reshape { } }
input { name: "request_output_len" data_type: TYPE_UINT32 dims: [1] }
output { name: "output_ids" data_type: TYPE_INT32 dims: [-1, -1] }
parameters { key: "gpt_model_type" value { string_value: "V1" } }
parameters { key: "gpt_model_path" value { string_value: "/engines/tiny" } }
parameters { key: "batch_scheduler_policy" value { string_value: "guaranteed_completion" } }
parameters { key: "llmserve.stand_in" value { string_value: "{\\"path\\": \\"FOLDER\\"}" } }
""",
    "postprocessing": f"""{_PYTHON}
max_batch_size: 128
input {{ name: "TOKENS_BATCH" data_type: TYPE_INT32 dims: [-1, -1] }}
output {{ name: "OUTPUT" data_type: TYPE_STRING dims: [-1] }}
""",
    "ensemble": """
platform: "ensemble"
max_batch_size: 128
input { name: "text_input" data_type: TYPE_STRING dims: [-1] }
input { name: "max_tokens" data_type: TYPE_UINT32 dims: [-1] }
input { name: "bad_words" data_type: TYPE_STRING dims: [-1] }
input { name: "stop_words" data_type: TYPE_STRING dims: [-1] }
output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
ensemble_scheduling {
  step {
    model_name: "preprocessing" model_version: -1
    input_map { key: "QUERY" value: "text_input" }
    input_map { key: "REQUEST_OUTPUT_LEN" value: "max_tokens" }
    input_map { key: "BAD_WORDS_DICT" value: "bad_words" }
    input_map { key: "STOP_WORDS_DICT" value: "stop_words" }
    output_map { key: "INPUT_ID" value: "ids" }
    output_map { key: "REQUEST_INPUT_LEN" value: "length" }
    output_map { key: "REQUEST_OUTPUT_LEN" value: "most" }
  }
  step {
    model_name: "tensorrt_llm" model_version: -1
    input_map { key: "input_ids" value: "ids" }
    input_map { key: "input_lengths" value: "length" }
    input_map { key: "request_output_len" value: "most" }
    output_map { key: "output_ids" value: "answer" }
  }
  step {
    model_name: "postprocessing" model_version: -1
    input_map { key: "TOKENS_BATCH" value: "answer" }
    output_map { key: "OUTPUT" value: "text_output" }
  }
}
""",
}
"""In the order in which Triton has to load them."""
