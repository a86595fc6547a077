"""The tensors of every model besides the request options, named as in TensorRT-LLM's ensemble."""

from __future__ import annotations

from dataclasses import dataclass

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
    vector: bool = False
    """Whether each prompt has as many values as the dimensions say, not one. Of outputs only."""

    def __post_init__(self) -> None:
        if self.data_type not in TYPES:
            raise ValueError(
                f"tensor {self.name} cannot be {self.data_type}: choose one of {', '.join(TYPES)}"
            )


TEXT_INPUT = Tensor("text_input", "TYPE_STRING", optional=False)
MESSAGES = Tensor("messages", "TYPE_STRING")
"""JSON: a conversation, instead of ``text_input``."""
TEXT_PAIR = Tensor("text_pair", "TYPE_STRING")
"""The second text of a pair, such as the document that ``text_input`` asks about."""

TEXT_OUTPUT = Tensor("text_output", "TYPE_STRING", optional=False)
FINISH_REASON = Tensor("finish_reason", "TYPE_STRING", optional=False)
USAGE = (
    Tensor("num_input_tokens", "TYPE_INT32", optional=False),
    Tensor("num_output_tokens", "TYPE_INT32", optional=False),
)
DECLARED_TEXTS = {name: f"llmserve.{name}" for name in (TEXT_INPUT.name, TEXT_OUTPUT.name)}
"""Parameters of a configuration that name these tensors, where somebody else's model calls them
otherwise; ``serve`` adds them for what ``llmserve.toml`` says."""


def declared_texts(texts: tuple[str, str]) -> tuple[str, ...]:
    """Return the lines that a configuration needs for the names of its texts in and out.

    >>> declared_texts(("PROMPT", "ANSWER"))[0]
    'parameters { key: "llmserve.text_input" value { string_value: "PROMPT" } }'
    """
    return tuple(
        f'parameters {{ key: "{parameter}" value {{ string_value: "{tensor}" }} }}'
        for parameter, tensor in zip(DECLARED_TEXTS.values(), texts, strict=True)
    )


PROMPT_REPORT = Tensor(TEXT_OUTPUT.name, TEXT_OUTPUT.data_type)
"""``text_output`` of a model that answers with values: only how it reads a prompt."""
TEXT_FORMAT_OUTPUTS = (TEXT_OUTPUT, FINISH_REASON, *USAGE)

LOGPROBS_OUTPUTS = (
    Tensor("logprobs", "TYPE_STRING"),
    Tensor("output_log_probs", "TYPE_FP32", dims=(-1, -1)),
    Tensor("cum_log_probs", "TYPE_FP32"),
)
"""Outputs only for requests that ask for them: a response may omit outputs.

``logprobs`` is JSON with an entry per token. The other two are the same as in TensorRT-LLM.
"""

PROMPT_LOGPROBS_OUTPUT = Tensor("prompt_logprobs", "TYPE_STRING")
"""JSON like that of ``logprobs``, sent with the first piece; the first token has no probability."""

CACHED_TOKENS = Tensor("num_cached_tokens", "TYPE_INT32")
"""How many of the prompt's tokens were in a cache already; sent with the end of an answer, by
generators that set :attr:`Generation.cached_tokens`."""

ENGINE_OUTPUTS = (CACHED_TOKENS, *LOGPROBS_OUTPUTS, PROMPT_LOGPROBS_OUTPUT)
"""What answers of ``llmserve.runtime.Engine`` may have besides the formatter's outputs."""

EMBEDDING = Tensor("embedding", "TYPE_FP32", dims=(-1,), optional=False, vector=True)
SCORE = Tensor("score", "TYPE_FP32", optional=False)
LABEL = Tensor("label", "TYPE_STRING", dims=(-1,), optional=False, vector=True)
"""All labels of the model, the likeliest first."""
PROBABILITY = Tensor("probability", "TYPE_FP32", dims=(-1,), optional=False, vector=True)
"""The probability of each label, in the same order."""
INPUT_TOKENS = USAGE[0]
