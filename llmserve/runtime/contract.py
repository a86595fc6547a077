"""The contract, for plugins: tensors and options of every model, and names that processes share."""

from __future__ import annotations

from llmserve.contract.names import MANIFEST as MANIFEST
from llmserve.contract.names import SCHEMA as SCHEMA
from llmserve.contract.names import STAND_IN_METRIC as STAND_IN_METRIC
from llmserve.contract.names import THREADS as THREADS
from llmserve.contract.options import ALIASES as ALIASES
from llmserve.contract.options import ANSWER as ANSWER
from llmserve.contract.options import CHAT_TEMPLATE_KWARGS as CHAT_TEMPLATE_KWARGS
from llmserve.contract.options import DEFAULT_LENGTH as DEFAULT_LENGTH
from llmserve.contract.options import FILL_CONTEXT as FILL_CONTEXT
from llmserve.contract.options import FORMS as FORMS
from llmserve.contract.options import INCLUDE_STOP as INCLUDE_STOP
from llmserve.contract.options import INPUT_IDS as INPUT_IDS
from llmserve.contract.options import LOGIT_BIAS as LOGIT_BIAS
from llmserve.contract.options import LOGPROBS as LOGPROBS
from llmserve.contract.options import MAX_TOKENS as MAX_TOKENS
from llmserve.contract.options import PROMPT_LOGPROBS as PROMPT_LOGPROBS
from llmserve.contract.options import PROMPT_ONLY as PROMPT_ONLY
from llmserve.contract.options import SAMPLING as SAMPLING
from llmserve.contract.options import STOP_WORDS as STOP_WORDS
from llmserve.contract.options import STREAM as STREAM
from llmserve.contract.options import TEXT_FORMAT_INPUTS as TEXT_FORMAT_INPUTS
from llmserve.contract.tensors import CACHED_TOKENS as CACHED_TOKENS
from llmserve.contract.tensors import FINISH_REASON as FINISH_REASON
from llmserve.contract.tensors import LOGPROBS_OUTPUTS as LOGPROBS_OUTPUTS
from llmserve.contract.tensors import MESSAGES as MESSAGES
from llmserve.contract.tensors import PROMPT_LOGPROBS_OUTPUT as PROMPT_LOGPROBS_OUTPUT
from llmserve.contract.tensors import TEXT_FORMAT_OUTPUTS as TEXT_FORMAT_OUTPUTS
from llmserve.contract.tensors import TEXT_INPUT as TEXT_INPUT
from llmserve.contract.tensors import TEXT_OUTPUT as TEXT_OUTPUT
from llmserve.contract.tensors import TYPES as TYPES
from llmserve.contract.tensors import USAGE as USAGE
from llmserve.contract.tensors import Tensor as Tensor
