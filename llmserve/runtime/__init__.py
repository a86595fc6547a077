"""The code that runs inside Triton's Python backend, and the only import that plugins need there.

Everything here is loaded in the server's stub process. It imports the standard library and numpy,
torch and transformers only where they are used, and nothing else of llmserve. Each name is loaded
on first use, so that the builder can read the tensor contract without numpy.

A request travels ``model`` → ``request`` → a driver (``batch``, ``continuous``) → a generator →
``generation`` → a formatter → ``responder``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmserve.runtime.batch import BatchDriver as BatchDriver
    from llmserve.runtime.batch import run_batch as run_batch
    from llmserve.runtime.continuous import ContinuousDriver as ContinuousDriver
    from llmserve.runtime.contract import Tensor as Tensor
    from llmserve.runtime.errors import RequestError as RequestError
    from llmserve.runtime.generation import Constraint as Constraint
    from llmserve.runtime.generation import Generation as Generation
    from llmserve.runtime.hf_tokenizer import TransformersTokenizer as TransformersTokenizer
    from llmserve.runtime.job import Job as Job
    from llmserve.runtime.location import located as located
    from llmserve.runtime.logprobs import Logprob as Logprob
    from llmserve.runtime.metrics import Metrics as Metrics
    from llmserve.runtime.outputs import format_answers as format_answers
    from llmserve.runtime.params import Params as Params
    from llmserve.runtime.params import read_params as read_params
    from llmserve.runtime.protocols import Answer as Answer
    from llmserve.runtime.protocols import ConstrainingFormatter as ConstrainingFormatter
    from llmserve.runtime.protocols import Driver as Driver
    from llmserve.runtime.protocols import Formatter as Formatter
    from llmserve.runtime.protocols import Generator as Generator
    from llmserve.runtime.protocols import Parts as Parts
    from llmserve.runtime.protocols import Progress as Progress
    from llmserve.runtime.protocols import Stepper as Stepper
    from llmserve.runtime.protocols import SteppingGenerator as SteppingGenerator
    from llmserve.runtime.protocols import Tokenizer as Tokenizer
    from llmserve.runtime.protocols import strings as strings
    from llmserve.runtime.request import Prompt as Prompt
    from llmserve.runtime.request import about_prompt as about_prompt
    from llmserve.runtime.request import answer_limit as answer_limit
    from llmserve.runtime.request import read_prompts as read_prompts
    from llmserve.runtime.responder import Responder as Responder
    from llmserve.runtime.responder import Tensors as Tensors
    from llmserve.runtime.responder import failure as failure
    from llmserve.runtime.responder import respond as respond
    from llmserve.runtime.responder import tensors_of as tensors_of
    from llmserve.runtime.sampling import Sampler as Sampler
    from llmserve.runtime.text import IncrementalDecoder as IncrementalDecoder
    from llmserve.runtime.text_formatter import TextFormatter as TextFormatter

_NAMES_OF_MODULE = {
    "batch": ("BatchDriver", "run_batch"),
    "continuous": ("ContinuousDriver",),
    "contract": ("Tensor",),
    "errors": ("RequestError",),
    "generation": ("Constraint", "Generation"),
    "hf_tokenizer": ("TransformersTokenizer",),
    "job": ("Job",),
    "location": ("located",),
    "logprobs": ("Logprob",),
    "metrics": ("Metrics",),
    "outputs": ("format_answers",),
    "params": ("Params", "read_params"),
    "protocols": (
        "Answer", "ConstrainingFormatter", "Driver", "Formatter", "Generator",
        "Parts", "Progress", "Stepper", "SteppingGenerator", "Tokenizer", "strings",
    ),
    "request": ("Prompt", "about_prompt", "answer_limit", "read_prompts"),
    "responder": ("Responder", "Tensors", "failure", "respond", "tensors_of"),
    "sampling": ("Sampler",),
    "text": ("IncrementalDecoder",),
    "text_formatter": ("TextFormatter",),
}  # fmt: skip
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}

__all__ = sorted(_MODULE_OF_NAME)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)
