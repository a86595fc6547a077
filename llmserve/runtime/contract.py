"""The tensor contract: the names every model speaks, those of TensorRT-LLM's ensemble.

``build`` writes them into ``config.pbtxt`` and the runtime reads them from requests,
so both take them from here.
"""

from __future__ import annotations

from dataclasses import dataclass

MANIFEST = "llmserve.json"
"""The file in a model's folder that says what the model was made from, and how to run it."""

SCHEMA = 1
"""The form of that file; a change that older runtimes cannot read raises this."""


TYPES = {"TYPE_BOOL": "bool", "TYPE_STRING": "object"} | {
    f"TYPE_{short}{bits}": f"{kind}{bits}"
    for short, kind in (("FP", "float"), ("INT", "int"), ("UINT", "uint"))
    for bits in (8, 16, 32, 64)
    if (short, bits) != ("FP", 8)
}
"""What a tensor's elements can be, as ``config.pbtxt`` writes it, and numpy's name for that."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as ``config.pbtxt`` declares it, without the batch dimension."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    ragged: bool = False

    def __post_init__(self) -> None:
        if self.data_type not in TYPES:
            raise ValueError(
                f"tensor {self.name} cannot be {self.data_type}: choose one of {', '.join(TYPES)}"
            )


TEXT_INPUT = Tensor("text_input", "TYPE_STRING", optional=False)
MESSAGES = Tensor("messages", "TYPE_STRING")
MAX_TOKENS = Tensor("max_tokens", "TYPE_INT32")
STREAM = Tensor("stream", "TYPE_BOOL")
CHAT_TEMPLATE_KWARGS = Tensor("chat_template_kwargs", "TYPE_STRING")
"""JSON: what the chat template is given beside the messages, such as ``tools``."""

INPUT_IDS = Tensor("input_ids", "TYPE_INT32", dims=(-1,), ragged=True)
"""A prompt as token ids, instead of ``text_input``."""
PROMPT_ONLY = Tensor("prompt_only", "TYPE_BOOL")
"""Asks what the prompt is to the model, instead of an answer: ``text_output`` is then JSON with
its ``ids``, their ``text`` and the model's ``context_length``; of an empty prompt also the
``chat_template``."""

SAMPLING = (
    Tensor("temperature", "TYPE_FP32"),
    Tensor("top_k", "TYPE_INT32"),
    Tensor("top_p", "TYPE_FP32"),
    Tensor("min_p", "TYPE_FP32"),
    Tensor("repetition_penalty", "TYPE_FP32"),
    Tensor("presence_penalty", "TYPE_FP32"),
    Tensor("frequency_penalty", "TYPE_FP32"),
    Tensor("seed", "TYPE_UINT64"),
    Tensor("random_seed", "TYPE_UINT64"),
    Tensor("min_tokens", "TYPE_INT32"),
    Tensor("ignore_eos", "TYPE_BOOL"),
    Tensor("end_id", "TYPE_INT32"),
    Tensor("bad_words", "TYPE_STRING", dims=(-1,), ragged=True),
)
"""What a generator that samples by ``llmserve.runtime.sampling`` honours."""

LOGIT_BIAS = Tensor("logit_bias", "TYPE_STRING")
"""JSON: what to add to the scores of tokens, by their ids. ``runtime.sampling`` honours it."""

PROMPT_LOGPROBS = Tensor("prompt_logprobs", "TYPE_INT32")
"""Asks how likely the prompt's own tokens are, and how many others to tell at each place."""

LOGPROBS = (
    Tensor("logprobs", "TYPE_INT32"),
    Tensor("return_log_probs", "TYPE_BOOL"),
)
"""What a generator honours that pushes its logits beside its tokens."""

LOGPROBS_OUTPUTS = (
    Tensor("logprobs", "TYPE_STRING"),
    Tensor("output_log_probs", "TYPE_FP32", dims=(-1, -1)),
    Tensor("cum_log_probs", "TYPE_FP32"),
)
"""What only requests that ask for it get: a response may leave outputs out.

``logprobs`` is JSON with an entry per token. The other two are as TensorRT-LLM has them.
"""

FORMS = (
    Tensor("json_schema", "TYPE_STRING"),
    Tensor("json_object", "TYPE_BOOL"),
    Tensor("choice", "TYPE_STRING", dims=(-1,), ragged=True),
    Tensor("regex", "TYPE_STRING"),
    Tensor("grammar", "TYPE_STRING"),
    Tensor("guided_decoding_guide_type", "TYPE_STRING"),
    Tensor("guided_decoding_guide", "TYPE_STRING"),
)
"""What an answer can be held to; the last two are TensorRT-LLM's names for the same."""

PROMPT_LOGPROBS_OUTPUT = Tensor("prompt_logprobs", "TYPE_STRING")
"""JSON as that of ``logprobs``, with the first piece; before the first token nothing is likely."""

STOP_WORDS = Tensor("stop_words", "TYPE_STRING", dims=(-1,), ragged=True)
INCLUDE_STOP = Tensor("include_stop_str_in_output", "TYPE_BOOL")
"""Keeps the stop word at the end of the answer, so that it can be told which one it was."""

TEXT_OUTPUT = Tensor("text_output", "TYPE_STRING", optional=False)
FINISH_REASON = Tensor("finish_reason", "TYPE_STRING", optional=False)
USAGE = (
    Tensor("num_input_tokens", "TYPE_INT32", optional=False),
    Tensor("num_output_tokens", "TYPE_INT32", optional=False),
)

TEXT_FORMAT_INPUTS = (
    Tensor("exclude_input_in_output", "TYPE_BOOL"),
    # Usage is always sent; these are declared because Triton's OpenAI frontend sends them.
    Tensor("return_num_input_tokens", "TYPE_BOOL"),
    Tensor("return_num_output_tokens", "TYPE_BOOL"),
)

TEXT_FORMAT_OUTPUTS = (TEXT_OUTPUT, FINISH_REASON, *USAGE)

ALIASES = {"random_seed": "seed", "min_length": "min_tokens"}
"""Second names of the same thing: TensorRT-LLM has renamed some over its versions."""

THREADS = "LLMSERVE_THREADS"
"""The environment variable that says how many threads an engine has, where OpenMP is not asked."""

STAND_IN_METRIC = "llmserve_stand_in"
"""A gauge of 1, on the server's metrics, for each model that a stand-in answers.

Its labels are ``model`` and ``instead_of``.
"""
