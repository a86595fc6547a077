"""What runs inside Triton's Python backend: the one import of whoever writes for it.

Everything here is loaded in the server's stub process: the standard library and numpy, torch and
transformers only where they are used, and nothing else of llmserve. A name is loaded when it is
first used, so that the builder can read the tensor contract without numpy.

A request travels ``model`` → ``request`` → a driver (``batch``, ``continuous``) → a generator →
``generation`` → a formatter → ``responder``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmserve.runtime.batch import BatchDriver
    from llmserve.runtime.continuous import ContinuousDriver
    from llmserve.runtime.contract import Tensor
    from llmserve.runtime.errors import RequestError
    from llmserve.runtime.generation import Constraint, Generation
    from llmserve.runtime.hf_tokenizer import TransformersTokenizer
    from llmserve.runtime.job import Job
    from llmserve.runtime.location import located
    from llmserve.runtime.logprobs import Logprob
    from llmserve.runtime.outputs import format_answers
    from llmserve.runtime.params import Params
    from llmserve.runtime.protocols import (
        Answer,
        ConstrainingFormatter,
        Driver,
        Formatter,
        Generator,
        Parts,
        Progress,
        Stepper,
        SteppingGenerator,
        Tokenizer,
        strings,
    )
    from llmserve.runtime.request import Prompt, answer_limit, read_prompts
    from llmserve.runtime.responder import Responder
    from llmserve.runtime.sampling import Sampler
    from llmserve.runtime.stage import Tensors, failure, respond, tensors_of
    from llmserve.runtime.text import IncrementalDecoder
    from llmserve.runtime.text_formatter import TextFormatter

_HOMES = {
    "batch": ("BatchDriver",),
    "continuous": ("ContinuousDriver",),
    "contract": ("Tensor",),
    "errors": ("RequestError",),
    "generation": ("Constraint", "Generation"),
    "hf_tokenizer": ("TransformersTokenizer",),
    "job": ("Job",),
    "location": ("located",),
    "logprobs": ("Logprob",),
    "outputs": ("format_answers",),
    "params": ("Params",),
    "protocols": (
        "Answer", "ConstrainingFormatter", "Driver", "Formatter", "Generator",
        "Parts", "Progress", "Stepper", "SteppingGenerator", "Tokenizer", "strings",
    ),
    "request": ("Prompt", "answer_limit", "read_prompts"),
    "responder": ("Responder",),
    "sampling": ("Sampler",),
    "stage": ("Tensors", "failure", "respond", "tensors_of"),
    "text": ("IncrementalDecoder",),
    "text_formatter": ("TextFormatter",),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Answer",
    "BatchDriver",
    "ConstrainingFormatter",
    "Constraint",
    "ContinuousDriver",
    "Driver",
    "Formatter",
    "Generation",
    "Generator",
    "IncrementalDecoder",
    "Job",
    "Logprob",
    "Params",
    "Parts",
    "Progress",
    "Prompt",
    "RequestError",
    "Responder",
    "Sampler",
    "Stepper",
    "SteppingGenerator",
    "Tensor",
    "Tensors",
    "TextFormatter",
    "Tokenizer",
    "TransformersTokenizer",
    "answer_limit",
    "failure",
    "format_answers",
    "located",
    "read_prompts",
    "respond",
    "strings",
    "tensors_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
