"""The tensor contract: the tensors of every model, named as in TensorRT-LLM's ensemble.

``build`` writes the names into ``config.pbtxt`` and the runtime reads them from requests;
both import them from here.
"""

from __future__ import annotations

from dataclasses import dataclass

MANIFEST = "llmserve.json"
"""The file in a model's folder that records what the model was built from and how to run it."""

SCHEMA = 1
"""The version of that file's format; changes that older runtimes cannot read increment it."""


TYPES = {"TYPE_BOOL": "bool", "TYPE_STRING": "object"} | {
    f"TYPE_{short}{bits}": f"{kind}{bits}"
    for short, kind in (("FP", "float"), ("INT", "int"), ("UINT", "uint"))
    for bits in (8, 16, 32, 64)
    if (short, bits) != ("FP", 8)
}
"""The data types of tensors, from their names in ``config.pbtxt`` to those in numpy."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as declared in ``config.pbtxt``, without the batch dimension."""

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
"""JSON: arguments for the chat template besides the messages, such as ``tools``."""

DEFAULT_LENGTH = 256
"""The longest answer to a request that sets no ``max_tokens``, if the model's build sets none."""
FILL_CONTEXT = "fill_context"
"""A request parameter: without ``max_tokens``, an answer may take what is left of the context.

It is what OpenAI's API means by a request without a length. A length that the build sets holds
nevertheless.
"""

INPUT_IDS = Tensor("input_ids", "TYPE_INT32", dims=(-1,), ragged=True)
"""The prompt as token ids, instead of ``text_input``."""
PROMPT_ONLY = Tensor("prompt_only", "TYPE_BOOL")
"""Requests how the model reads the prompt, instead of an answer: ``text_output`` is then JSON with
the ``ids``, their ``text`` and the model's ``context_length``; for an empty prompt also the
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
"""The options that a generator supports by using ``llmserve.runtime.sampling``."""

LOGIT_BIAS = Tensor("logit_bias", "TYPE_STRING")
"""JSON: values to add to token scores, by token id. ``runtime.sampling`` supports it."""

PROMPT_LOGPROBS = Tensor("prompt_logprobs", "TYPE_INT32")
"""Requests log-probabilities of the prompt's tokens, and of this many others at each position."""

LOGPROBS = (
    Tensor("logprobs", "TYPE_INT32"),
    Tensor("return_log_probs", "TYPE_BOOL"),
)
"""The options that a generator supports by pushing its logits along with its tokens."""

LOGPROBS_OUTPUTS = (
    Tensor("logprobs", "TYPE_STRING"),
    Tensor("output_log_probs", "TYPE_FP32", dims=(-1, -1)),
    Tensor("cum_log_probs", "TYPE_FP32"),
)
"""Outputs only for requests that ask for them: a response may omit outputs.

``logprobs`` is JSON with an entry per token. The other two are the same as in TensorRT-LLM.
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
"""The constraints on an answer; the last two are TensorRT-LLM's names for the others."""

PROMPT_LOGPROBS_OUTPUT = Tensor("prompt_logprobs", "TYPE_STRING")
"""JSON like that of ``logprobs``, sent with the first piece; the first token has no probability."""

STOP_WORDS = Tensor("stop_words", "TYPE_STRING", dims=(-1,), ragged=True)
INCLUDE_STOP = Tensor("include_stop_str_in_output", "TYPE_BOOL")
"""Keeps the stop word at the end of the answer, so that the client can see which one it was."""

TEXT_OUTPUT = Tensor("text_output", "TYPE_STRING", optional=False)
FINISH_REASON = Tensor("finish_reason", "TYPE_STRING", optional=False)
USAGE = (
    Tensor("num_input_tokens", "TYPE_INT32", optional=False),
    Tensor("num_output_tokens", "TYPE_INT32", optional=False),
)

CACHED_TOKENS = Tensor("num_cached_tokens", "TYPE_INT32")
"""How many of the prompt's tokens were in a cache already; sent with the end of an answer, by
generators that set :attr:`Generation.cached_tokens`."""

TEXT_FORMAT_INPUTS = (
    Tensor("exclude_input_in_output", "TYPE_BOOL"),
    # Usage is always sent; these are declared because Triton's OpenAI frontend sends them.
    Tensor("return_num_input_tokens", "TYPE_BOOL"),
    Tensor("return_num_output_tokens", "TYPE_BOOL"),
)

TEXT_FORMAT_OUTPUTS = (TEXT_OUTPUT, FINISH_REASON, *USAGE)

ALIASES = {"random_seed": "seed", "min_length": "min_tokens"}
"""Alternative names of options: TensorRT-LLM has renamed some of them between versions."""

THREADS = "LLMSERVE_THREADS"
"""The environment variable with the number of threads of an engine that does not use OpenMP."""

STAND_IN_METRIC = "llmserve_stand_in"
"""A gauge of 1 in the server's metrics for each model whose requests a stand-in answers.

Its labels are ``model`` and ``instead_of``.
"""
