"""What a role's runtime class must offer. A class that has these methods fits; none inherits.

Each is made once, when Triton loads the model, as ``Class(settings, folder)``: the settings
that its component's ``prepare`` returned at build time and the version folder of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmserve.runtime.contract import Tensor
from llmserve.runtime.generation import Constraint, Generation
from llmserve.runtime.logprobs import Logprob


class Tokenizer(Protocol):
    """Text to ids and back.

    One whose component declares ``chat_template_kwargs`` takes them in :meth:`encode_chat` by
    their names; one with a ``vocab_size``, how many ids there are, lets prompts come as ids; one
    with a ``chat_template`` shows its text to who asks how the model calls tools.
    """

    eos_ids: frozenset[int]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text, with the model's own beginning where ``special``."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation up to where the answer begins."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, leaving out special tokens."""


class Generator(Protocol):
    """Ids to more ids, in the mode ``"batch"``."""

    context_length: int | None
    eos_ids: frozenset[int]

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Push tokens into every generation until all are done."""


@dataclass
class Progress:
    """What a step brought, beside the tokens that were pushed: who failed at it, alone."""

    failed: list[tuple[Generation, Exception]] = field(default_factory=list)


class Stepper(Protocol):
    """What decodes many generations at once, a token of each at a time."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""

    @property
    def live(self) -> int:
        """How many generations are under way."""

    @property
    def waiting(self) -> int:
        """How many wait for room."""

    @property
    def cache_used(self) -> int:
        """How many tokens' room those under way hold."""

    @property
    def cache_tokens(self) -> int:
        """How many tokens there is room for."""

    def admit(self, generation: Generation) -> None:
        """Take a generation, now or when there is room; refuse what can never run.

        One that was dropped may come again: it has tokens already and goes on behind them.
        """

    def step(self) -> Progress:
        """Push a token, or more where no choice is left, into every generation under way."""

    def drop(self, generation: Generation) -> None:
        """Forget a generation and free what it holds."""


class SteppingGenerator(Protocol):
    """Ids to more ids, in the mode ``"step"``: the driver decides when a step is made."""

    context_length: int | None
    eos_ids: frozenset[int]

    def stepper(self, tokenizer: Tokenizer) -> Stepper:
        """Return what makes the steps; called once, before the first request."""


@dataclass(frozen=True)
class Answer:
    """What a formatter sees of one prompt: a new piece of its answer, or the whole of it.

    ``logprobs`` are those of the piece's tokens, None if they were not asked for, and ``texts``
    what each token in them looks like; ``total_logprob`` is the sum from the beginning.
    """

    text: str
    prompt: str
    finish_reason: str | None
    input_tokens: int
    output_tokens: int
    echo: bool
    logprobs: Sequence[Logprob] | None = None
    texts: Mapping[int, str] = field(default_factory=dict)
    total_logprob: float = 0.0
    prompt_logprobs: Sequence[Logprob] | None = None
    so_far: str = ""
    """All that was answered, this piece included: a formatter keeps nothing between pieces."""


class Formatter(Protocol):
    """Answers to response tensors."""

    def format(self, answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
        """Return each output tensor; the first dimension is that of the answers."""


class ConstrainingFormatter(Formatter, Protocol):
    """A formatter that can also hold answers to a form, where a request asks for that."""

    def constrain(self, generation: Generation, tokenizer: Tokenizer) -> Constraint | None:
        """Return what an answer is held to, None if it is free; called before its first token.

        What cannot be had is refused with a ``RequestError``.
        """


class Driver(Protocol):
    """How requests reach the generator: the runtime of a batching strategy.

    One that computes in a thread of its own says ``has_thread = True``. Then the parts are made,
    and ``start`` is called, in a thread that ends, so that none but its own computes.
    """

    def start(self, parts: Parts) -> None:
        """Take the model's other parts; called once, before the first request."""

    def execute(self, requests: Sequence[Any]) -> Sequence[Any] | None:
        """Answer Triton's requests, as ``TritonPythonModel.execute`` does."""

    def finalize(self) -> None:
        """Let go of everything; the model is being unloaded."""


@dataclass(frozen=True)
class Parts:
    """The parts of a model as they were made from its manifest.

    A stage of an ensemble has those that its build gave it; each of the others is None.
    """

    name: str
    tokenizer: Tokenizer
    generator: Any
    """A :class:`Generator` or a :class:`SteppingGenerator`, as the batching's mode wants it."""
    formatter: Formatter
    inputs: frozenset[str]
    extras: frozenset[str]
    batched: bool
    decoupled: bool
    defaults: Mapping[str, Any]
    pb_utils: Any
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """What the formatter may return, by name; empty where that is not known."""


def strings(values: Sequence[str]) -> npt.NDArray[Any]:
    """Return texts as a tensor of Triton's BYTES."""
    return np.array([value.encode() for value in values], dtype=np.object_)
