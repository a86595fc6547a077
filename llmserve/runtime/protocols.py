"""The protocols of the roles' runtime classes. A class needs these methods, not a base class.

Each class is instantiated once, when Triton loads the model, as ``Class(settings, folder)``, with
the settings that its component's ``prepare`` returned at build time and the model's version folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmserve.contract.tasks import TOKENS
from llmserve.contract.tensors import Tensor
from llmserve.runtime.answer.fill_in import File, FillIn
from llmserve.runtime.answer.generation import Constraint, Generation
from llmserve.runtime.answer.logprobs import Logprob
from llmserve.runtime.answer.params import Params


class Tokenizer(Protocol):
    """Converts text to token ids and back.

    If its component declares ``chat_template_kwargs``, :meth:`encode_chat` accepts them as keyword
    arguments. With a ``vocab_size``, the number of ids, it lets clients send prompts as ids. With a
    ``chat_template``, it lets clients read the template to see how the model calls tools.
    """

    eos_ids: frozenset[int]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text, preceded by the model's special tokens if ``special``."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation, up to the beginning of the answer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens."""


class FillInTokenizer(Tokenizer, Protocol):
    """A tokenizer whose model writes what is missing between two texts, if ``fill_in`` is set."""

    fill_in: FillIn | None

    def encode_fill_in(self, prefix: str, suffix: str, files: Sequence[File]) -> list[int]:
        """Return the ids of a prompt with a gap.

        No text of it may have the ids of special tokens, whatever it says.
        """


class PairTokenizer(Tokenizer, Protocol):
    """A tokenizer for models that answer with values: it can read a pair of texts, and cut.

    With ``prompts``, texts by name, a request can choose one that is put before its text;
    ``default_prompt`` is the name of the one that others get. One whose ``cuts_beginnings`` is true
    keeps the end of a text.
    """

    def encode_pair(
        self, text: str, pair: str | None = None, *, limit: int | None = None
    ) -> tuple[list[int], list[int] | None]:
        """Return the ids of a text, or of two, and for two the segment of each if it matters.

        With a ``limit``, there are at most so many, and what ends a text for the model is kept.
        """


class SeeingTokenizer(Tokenizer, Protocol):
    """A tokenizer for models that read images."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of which :meth:`encode_chat` makes ids, with a mark for each image."""


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt with images, as its model reads it."""

    ids: Sequence[int]
    """Those of the text, with the tokens that stand for the images."""
    images: Any
    """What the generator computes the images from; it finds this in ``Generation.images``."""
    adapter: str = ""
    """The adapter that a request with images is answered with, if there is one."""


class Generator(Protocol):
    """Answers in mode ``"batch"``: with tokens, or each with one value.

    One that takes images itself has ``read_images(text, urls)``, which returns the
    :class:`SeenPrompt` of a rendered conversation and of its images, in the order of their marks,
    or raises ``RequestError``. Its tokenizer is a :class:`SeeingTokenizer`. With
    ``about_images()`` it tells the limits of images, and how many tokens one has.
    """

    context_length: int | None
    eos_ids: frozenset[int]

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        """Push tokens into every generation until all are done, or finish each with its value."""


@dataclass
class Progress:
    """The result of a step besides the pushed tokens: the generations that failed, and why."""

    failed: list[tuple[Generation, Exception]] = field(default_factory=list)


class Stepper(Protocol):
    """Decodes many generations concurrently, one token of each per step."""

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""

    @property
    def live(self) -> int:
        """How many generations are running."""

    @property
    def waiting(self) -> int:
        """How many generations wait for space in the cache."""

    @property
    def cache_used(self) -> int:
        """How many tokens of the cache the running generations occupy."""

    @property
    def cache_tokens(self) -> int:
        """How many tokens the cache can hold."""

    def admit(self, generation: Generation) -> None:
        """Accept a generation, to run now or when there is space; refuse one that can never run.

        A generation that was dropped may be admitted again; it continues after its last token.
        """

    def step(self) -> Progress:
        """Push a token, or several if they are forced, into every running generation."""

    def drop(self, generation: Generation) -> None:
        """Remove a generation and free its resources."""


class SteppingGenerator(Protocol):
    """Generates tokens in mode ``"step"``: the driver decides when to run a step."""

    context_length: int | None
    eos_ids: frozenset[int]

    def stepper(self, tokenizer: Tokenizer) -> Stepper:
        """Return the stepper; called once, before the first request."""


@dataclass(frozen=True)
class Answer:
    """The input of a formatter for one prompt: a new piece of its answer, or the whole answer.

    ``logprobs`` are those of the piece's tokens, None if the request does not ask for them, and
    ``texts`` are the texts of all their tokens; ``total_logprob`` is the sum from the beginning.
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
    """The answer up to and including this piece; a formatter keeps no state between pieces."""
    cached_tokens: int | None = None
    """How many of the prompt's tokens were not computed; None until the end, or if unknown."""
    value: npt.NDArray[np.float32] | None = None
    """What a generator that answers with values has computed; there is no text then."""
    params: Params | None = None


class Formatter(Protocol):
    """Converts answers to response tensors.

    If it has a method ``check(params)``, it is called when a request is read, before anything is
    computed for it, and raises ``RequestError`` for options that it cannot meet.
    """

    def format(self, answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
        """Return the output tensors; the first dimension of each is the number of answers."""


class ConstrainingFormatter(Formatter, Protocol):
    """A formatter that can also constrain answers if a request asks for it.

    If it has a method ``close``, it is called when the model is unloaded, after the driver's
    ``finalize``.
    """

    def constrain(self, generation: Generation, tokenizer: Tokenizer) -> Constraint | None:
        """Return the constraint on an answer, None for none; called before its first token.

        Raise ``RequestError`` for a constraint that cannot be enforced.
        """


class Driver(Protocol):
    """Passes requests to the generator: the runtime of a batching strategy.

    A driver that computes in its own thread sets ``has_thread = True``. The parts are then created,
    and ``start`` is called, in a temporary thread, so that only the driver's thread computes later.
    """

    def start(self, parts: Parts) -> None:
        """Receive the model's other parts; called once, before the first request."""

    def execute(self, requests: Sequence[Any]) -> Sequence[Any] | None:
        """Answer Triton's requests, as ``TritonPythonModel.execute`` does."""

    def finalize(self) -> None:
        """Release all resources; the model is being unloaded."""


@dataclass(frozen=True)
class Parts:
    """The parts of a model, created from its manifest.

    In a stage of an ensemble, parts that the build did not assign to the stage are None.
    """

    name: str
    tokenizer: Tokenizer
    generator: Any
    """A :class:`Generator` or a :class:`SteppingGenerator`, depending on the batching's mode."""
    formatter: Formatter
    inputs: frozenset[str]
    extras: frozenset[str]
    batched: bool
    decoupled: bool
    defaults: Mapping[str, Any]
    pb_utils: Any
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """The outputs that the formatter may return, by name; empty if unknown."""
    answers: str = TOKENS
    """What the generator answers with."""
    shared: Any = None
    """The model's ``SharedStreams``, if it has any; a driver that holds jobs need not know them."""
    built: int | None = None
    """When the model was built, in seconds since 1970, as far as its files tell."""


def strings(values: Sequence[str]) -> npt.NDArray[Any]:
    """Return texts as a tensor of Triton's type BYTES."""
    return np.array([value.encode() for value in values], dtype=np.object_)
