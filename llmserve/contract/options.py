"""The options of a request, each said once.

A field of :class:`RequestOptions` is an option: its name, its type and default, and the rest of its
row. From the rows are made the inputs in ``config.pbtxt``, what the runtime reads, what the client
and the gateway send, the OpenAPI document, the shell's completion and the reference page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, ParamSpec

from llmserve.contract.classes import CLASSES, LAST_CLASS
from llmserve.contract.tensors import Tensor

Kind = Literal["whole", "number", "flag", "text", "words", "ids", "biases", "object"]
Group = Literal[
    "answer", "sampling", "biases", "logprobs", "prompt", "forms", "format", "chat", "reading",
    "vector", "images", "adapter", "",
]  # fmt: skip

INT32 = 2**31 - 1
BIASES = -100, 100
"""What can be added to the score of a token."""
MAX_LOGPROBS = 20
"""The maximum number of other tokens that a request may ask for at each position."""
DEFAULT_LENGTH = 256
"""The longest answer to a request that sets no ``max_tokens``, if the model's build sets none."""

_TYPES = {"whole": "TYPE_INT32", "number": "TYPE_FP32", "flag": "TYPE_BOOL", "ids": "TYPE_INT32"}
_LISTS = ("words", "ids")


@dataclass(frozen=True)
class RequestOption:
    """A row: one option of a request."""

    kind: Kind
    group: Group
    """Options that a model takes together, as a part of the contract; without one, no input has
    the option, and it is only a parameter."""
    help: str
    default: Any = None
    low: float = 0
    high: float = INT32
    """The range of a number; of a list or an object, that of its length."""
    above: bool = False
    """Whether the value must be above ``low``."""
    json: bool = False
    """Whether the value of a Python client may be an object, which is sent as JSON."""
    data_type: str = ""
    """The type of the input, if it is not the usual one of the kind."""
    aliases: tuple[str, ...] = ()
    """Other names: TensorRT-LLM has renamed some options between versions."""
    declared_aliases: tuple[str, ...] = ()
    """Those of them that are inputs too."""
    set_by: Literal["user", "client", "frontend"] = "user"
    """``client``: which of its methods is called sets it. ``frontend``: so do servers before Triton
    with an API of their own."""
    api: str = ""
    """The field of OpenAI's API, or one that vLLM added to it; in a form, its name in vLLM's
    ``structured_outputs``. Without one, the gateway does not pass on the option as it is."""
    api_range: tuple[float, float] | None = None
    """The range that the API allows, if it is narrower."""
    of_tokens: bool = False
    """Whether only an answer that consists of tokens can have it."""
    own_responses: bool = False
    """Whether an answer with it has more than text, which a shared stream does not carry."""
    longest: int = 256
    """How many characters each text of a list may have."""
    name: str = ""

    @property
    def is_list(self) -> bool:
        return self.kind in _LISTS

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        names = (self.name, *self.declared_aliases) if self.group else ()
        kind = self.data_type or _TYPES.get(self.kind, "TYPE_STRING")
        dims = (-1,) if self.is_list else (1,)
        return tuple(Tensor(name, kind, dims, ragged=self.is_list) for name in names)


_P = ParamSpec("_P")


def _as_field(row: Callable[_P, RequestOption]) -> Callable[_P, Any]:
    def make(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        option = row(*args, **kwargs)
        if option.default == {}:
            return field(default_factory=dict, metadata={"row": option})
        return field(default=option.default, metadata={"row": option})

    return make


_option = _as_field(RequestOption)


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options of one request. Those that it does not set have their defaults."""

    max_tokens: int | None = _option(
        "whole", "answer", "Maximum number of tokens to generate.", low=1, of_tokens=True
    )
    stream: bool | None = _option(
        "flag", "answer", "Whether to send the answer in pieces.", set_by="client", of_tokens=True
    )
    # After every token, the text is searched for every word, while the rest of the batch waits.
    stop_words: tuple[str, ...] = _option(
        "words", "answer", "Texts that end the answer and are not part of it.", (),
        high=64, api="stop", of_tokens=True,
    )  # fmt: skip
    include_stop_str_in_output: bool = _option(
        "flag", "answer", "Keep the stop word at the end of the answer.", False,
        api="include_stop_str_in_output", of_tokens=True,
    )  # fmt: skip
    input_ids: tuple[int, ...] = _option(
        "ids", "answer", "The prompt as token ids, instead of text_input.", ()
    )
    adapter: str | None = _option(
        "text", "adapter", "The name of an adapter of the model, which then answers with it.",
        of_tokens=True,
    )  # fmt: skip
    prompt_only: bool = _option(
        "flag", "answer",
        "Return how the model reads the prompt, instead of an answer: JSON with the ids, their "
        "text and the model's context_length; for an empty prompt also the chat_template.", False,
    )  # fmt: skip

    # Templates put a place for each image of a message where the model looks for it.
    image_url: tuple[str, ...] = _option(
        "words", "images", "The images of the prompt, as addresses such as "
        "data:image/png;base64,…; a message shows the next one with a part of the type image.", (),
        high=32, longest=32 << 20, of_tokens=True,
    )  # fmt: skip

    temperature: float | None = _option(
        "number", "sampling", "Sampling temperature; 0 is greedy.", high=100,
        api="temperature", api_range=(0, 2),
    )  # fmt: skip
    top_k: int = _option(
        "whole", "sampling", "Sample from the N likeliest tokens.", 0, low=-1, api="top_k"
    )
    top_p: float = _option(
        "number", "sampling", "Sample from the likeliest tokens with this total probability.", 1.0,
        high=1, above=True, api="top_p",
    )  # fmt: skip
    min_p: float = _option(
        "number", "sampling", "Sample from tokens at least this likely, as a part of the likeliest "
        "one's probability.", 0.0, high=1, api="min_p",
    )  # fmt: skip
    repetition_penalty: float = _option(
        "number", "sampling", "Divide the scores of tokens that occurred, prompt included.", 1.0,
        low=0.01, high=100, api="repetition_penalty",
    )  # fmt: skip
    presence_penalty: float = _option(
        "number", "sampling", "Lower the scores of tokens that the answer has already.", 0.0,
        low=-100, high=100, api="presence_penalty", api_range=(-2, 2),
    )  # fmt: skip
    frequency_penalty: float = _option(
        "number", "sampling", "Lower the scores of tokens each time that the answer has them.", 0.0,
        low=-100, high=100, api="frequency_penalty", api_range=(-2, 2),
    )  # fmt: skip
    seed: int | None = _option(
        "whole", "sampling", "Random seed; the same seed gives the same answer.",
        high=2**64 - 1, data_type="TYPE_UINT64", aliases=("random_seed",),
        declared_aliases=("random_seed",), api="seed", api_range=(0, 2**63 - 1),
    )  # fmt: skip
    min_tokens: int = _option(
        "whole", "sampling", "Minimum number of tokens to generate.", 0, aliases=("min_length",),
        api="min_tokens",
    )  # fmt: skip
    ignore_eos: bool = _option(
        "flag", "sampling", "Go on after the token that ends an answer.", False, api="ignore_eos"
    )
    end_id: int | None = _option(
        "whole", "sampling", "Token that ends the answer; -1 for the model's own.", low=-1
    )
    bad_words: tuple[str, ...] = _option(
        "words",
        "sampling",
        "Texts that the answer may not have, in the tokens of their usual spelling.",
        (),
        high=64,
        api="bad_words",
    )
    logit_bias: Mapping[int, float] = _option(
        "biases", "biases", "Values to add to token scores, by token id.", {},
        high=1024, json=True, api="logit_bias",
    )  # fmt: skip

    logprobs: int | None = _option(
        "whole", "logprobs", "Return log-probabilities, and those of the N likeliest tokens at "
        "each position.", high=MAX_LOGPROBS, own_responses=True,
    )  # fmt: skip
    return_log_probs: bool = _option(
        "flag", "logprobs", "Return log-probabilities in TensorRT-LLM's format.", False,
        own_responses=True,
    )  # fmt: skip
    prompt_logprobs: int | None = _option(
        "whole", "prompt", "The same as logprobs, of the prompt's tokens.", high=MAX_LOGPROBS,
        own_responses=True,
    )  # fmt: skip

    # One row of scores answers a question, however many answers it may have. vLLM takes as many.
    logprobs_of: tuple[str, ...] = _option(
        "words", "", "With logprobs: return, instead of the likeliest tokens, these texts in their "
        "order. Each has to be a single token as the beginning of the answer.", (), high=128,
    )  # fmt: skip

    json_schema: str | None = _option(
        "text", "forms", "Constrain the answer to this JSON schema.", json=True, api="json"
    )
    json_object: bool = _option(
        "flag", "forms", "Constrain the answer to any JSON object.", False, api="json_object"
    )
    # A list of choices is compiled only once, whatever its length.
    choice: tuple[str, ...] = _option(
        "words", "forms", "Constrain the answer to one of these.", (), high=1024, api="choice"
    )
    regex: str | None = _option(
        "text", "forms", "Constrain the answer to this regular expression.", api="regex"
    )
    grammar: str | None = _option(
        "text", "forms", "Constrain the answer to this grammar.", api="grammar"
    )
    guided_decoding_guide_type: str | None = _option(
        "text", "forms", "TensorRT-LLM's name for which of them to use."
    )
    guided_decoding_guide: str | None = _option(
        "text", "forms", "TensorRT-LLM's name for the schema, expression or grammar."
    )

    exclude_input_in_output: bool | None = _option(
        "flag", "format", "Whether to leave out the prompt before the answer."
    )
    # The counts are always sent; Triton's OpenAI frontend adds up those of a stream's pieces.
    return_num_input_tokens: bool = _option(
        "flag", "format", "Sent by Triton's OpenAI frontend.", False, set_by="frontend"
    )
    return_num_output_tokens: bool = _option(
        "flag", "format", "Sent by Triton's OpenAI frontend.", False, set_by="frontend",
        own_responses=True,
    )  # fmt: skip
    chat_template_kwargs: Mapping[str, Any] = _option(
        "object", "chat", "Arguments for the chat template besides the messages, such as tools.",
        {}, json=True,
    )  # fmt: skip
    thinking_token_budget: int | None = _option(
        "whole", "", "Close the model's thinking after so many tokens, if the engine can be "
        "constrained.", api="thinking_token_budget",
    )  # fmt: skip
    # These keep a constraint out of what precedes the answer proper; see runtime.answer.staged.
    thinking_marks: tuple[str, ...] = _option(
        "words", "", "What ends the model's thinking, what closes it early, and what begins it, "
        "if not every answer begins with it: constraints begin after it.", (),
        high=3, set_by="frontend",
    )  # fmt: skip
    call_marks: tuple[str, ...] = _option(
        "words", "", "Texts of which one begins a tool call: no constraint on the answer is one "
        "on that.", (), high=8, set_by="frontend",
    )  # fmt: skip
    call_schema: str | None = _option(
        "text", "", "Constrain what follows one of call_marks to this JSON schema.",
        set_by="frontend",
    )  # fmt: skip
    truncate: bool = _option(
        "flag", "reading", "Cut a text that is too long for the model, instead of refusing it.",
        False, api="truncate",
    )  # fmt: skip
    prompt_name: str | None = _option(
        "text", "reading", "Which of the model's own prompts to put before the text, such as query "
        "or document.", api="prompt_name",
    )  # fmt: skip
    dimensions: int | None = _option(
        "whole", "vector", "Keep only the first N numbers of an embedding.", low=1,
        api="dimensions",
    )  # fmt: skip
    normalize: bool | None = _option(
        "flag", "vector", "Whether embeddings have the length 1.", api="normalize"
    )
    suffix: str | None = _option(
        "text", "", "The text that follows the answer: the model fills in what is between the "
        "prompt and it, if its tokenizer has tokens for that.", of_tokens=True,
    )  # fmt: skip
    extra_files: str | None = _option(
        "text", "", "With suffix: other files of the project, as a JSON list of "
        '{"filename": …, "text": …}.', json=True, of_tokens=True,
    )  # fmt: skip
    # What OpenAI's API means by a request without a length. A length that the build sets holds.
    fill_context: bool = _option(
        "flag", "", "Without max_tokens, an answer may take what is left of the context.", False,
        set_by="frontend",
    )  # fmt: skip
    cache_salt: str | None = _option(
        "text", "", "Find only what is kept of prompts of requests with the same one.",
        set_by="frontend",
    )  # fmt: skip
    keep_longer: bool = _option(
        "flag", "", "Keep what is computed of it longer than of others, up to half of the cache.",
        False, set_by="frontend",
    )  # fmt: skip
    # Triton has a parameter `priority` of its own, which no model sees.
    priority_class: int = _option(
        "whole", "", "Its class in the engine's queue: a lower number goes first, and interrupts "
        "others.", 0, low=CLASSES[0], high=LAST_CLASS, set_by="frontend",
    )  # fmt: skip
    # See llmserve.contract.shared_stream.
    open_shared_stream: str | None = _option(
        "text", "", "Opens a stream of this name for the pieces of others' answers, instead of "
        "asking for one: 32 random hexadecimal digits.", set_by="client",
    )  # fmt: skip
    shared_stream: str | None = _option(
        "text", "", "The name of an open stream that shows the pieces of this answer early.",
        set_by="client",
    )  # fmt: skip


OPTIONS: Mapping[str, RequestOption] = {
    item.name: replace(item.metadata["row"], name=item.name) for item in fields(RequestOptions)
}
ALIASES = {alias: row.name for row in OPTIONS.values() for alias in row.aliases}
"""Alternative names of options: TensorRT-LLM has renamed some of them between versions."""
API_NAMES = {row.name: row.api for row in OPTIONS.values() if row.api and row.group != "forms"}
"""The fields of OpenAI's API that have options as they are."""
FILL_CONTEXT = OPTIONS["fill_context"].name
THINKING_BUDGET = OPTIONS["thinking_token_budget"].name
THINKING_MARKS = OPTIONS["thinking_marks"].name
CALL_MARKS = OPTIONS["call_marks"].name
CALL_SCHEMA = OPTIONS["call_schema"].name
CACHE_SALT = OPTIONS["cache_salt"].name
KEEP_LONGER = OPTIONS["keep_longer"].name
SUFFIX = OPTIONS["suffix"].name
EXTRA_FILES = OPTIONS["extra_files"].name
PRIORITY_CLASS = OPTIONS["priority_class"].name
LOGPROBS_OF = OPTIONS["logprobs_of"].name
OPEN_SHARED_STREAM = OPTIONS["open_shared_stream"].name
SHARED_STREAM = OPTIONS["shared_stream"].name
_OWN_RESPONSES = tuple(row.name for row in OPTIONS.values() if row.own_responses)


def is_carried(value_of: Callable[[str], Any]) -> bool:
    """Return whether a shared stream carries the answer to a request with these options.

    Others are answered as if they had named no stream.
    """
    return all(value_of(name) is None or value_of(name) is False for name in _OWN_RESPONSES)


def _input(name: str) -> Tensor:
    return OPTIONS[name].inputs[0]


def _inputs(group: Group) -> tuple[Tensor, ...]:
    rows = (row for row in OPTIONS.values() if row.group == group)
    return tuple(tensor for row in rows for tensor in row.inputs)


ANSWER = _inputs("answer")
"""The options of every model."""
MAX_TOKENS = _input("max_tokens")
STREAM = _input("stream")
STOP_WORDS = _input("stop_words")
INCLUDE_STOP = _input("include_stop_str_in_output")
INPUT_IDS = _input("input_ids")
PROMPT_ONLY = _input("prompt_only")
IMAGE_URL = _input("image_url")
"""A generator that declares it finds the images of a request in its params, and is sent messages
that show them."""
SAMPLING = _inputs("sampling")
"""The options that a generator supports by using ``llmserve.runtime.answer.sampling``."""
LOGIT_BIAS = _input("logit_bias")
"""``runtime.sampling`` supports it."""
LOGPROBS = _inputs("logprobs")
"""The options that a generator supports by pushing its logits along with its tokens."""
PROMPT_LOGPROBS = _input("prompt_logprobs")
ADAPTER = _input("adapter")
"""A generator that declares it finds the name in its params, and the adapters in its folder."""
ENGINE_OPTIONS = (*SAMPLING, LOGIT_BIAS, *LOGPROBS, PROMPT_LOGPROBS)
"""The options that ``llmserve.runtime.Engine`` supports, whatever its runner."""
FORMS = _inputs("forms")
"""The constraints on an answer; the last two are TensorRT-LLM's names for the others."""
TEXT_FORMAT_INPUTS = _inputs("format")
CHAT_TEMPLATE_KWARGS = _input("chat_template_kwargs")
READING = _inputs("reading")
"""How a model that answers with values reads a text."""
TRUNCATE, PROMPT_NAME = READING
VECTOR = _inputs("vector")
"""The options of an embedding."""
