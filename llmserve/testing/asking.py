"""What the conformance suite asks a served recipe, and how it says what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from llmserve.builder.build import BuildResult, build
from llmserve.errors import LLMServeError, RequestRejectedError, RequestTimeoutError
from llmserve.repository.manifest import Manifest
from llmserve.testing.live import LiveTriton
from llmserve.testing.verdict import Verdict

A = TypeVar("A")
B = TypeVar("B")

PROMPTS = (
    "Programming in C++ is like",
    "The capital of France is",
    "Once upon a time",
    "Hello",
    "The weather in Seoul is cold, and",
    "A",
    "Where is the nearest",
    "I am going to the market because",
)
_SECONDS_WITHOUT_END = 5.0
WORK = ("generator", "batching")
TEXT = ("tokenizer", "formatter")
# A value that any model which takes the wish could grant.
_WISHES: Mapping[str, Any] = {
    "temperature": 1.0,
    "seed": 7,
    "ignore_eos": True,
    "exclude_input_in_output": False,
}


class Asking:
    """Builds a recipe, asks it, and fails a test in words that its author can act on."""

    recipe: ClassVar[str]
    model: ClassVar[str]
    options: ClassVar[Mapping[str, Any]]
    prompts: ClassVar[Sequence[str]]
    _unlimited: ClassVar[dict[str, bool]] = {}

    @property
    def _verdict(self) -> Verdict:
        return Verdict(self.recipe, self.options)

    def _build(self, output: Path) -> BuildResult:
        try:
            return build(self.recipe, self.model, output=output, **self.options)
        except LLMServeError as error:
            self._verdict.error(f"building {self.model}", error)

    def _declared(self, triton: LiveTriton, name: str) -> frozenset[str]:
        """Return what the components of a model say that they take."""
        manifest = Manifest.read(triton.repository / name)
        return frozenset(manifest.contract["inputs"] if manifest else ())

    def _takes(self, triton: LiveTriton, name: str, *wishes: str) -> None:
        """Leave a test that asks for what no component declares, if it is refused as it should."""
        declared = self._declared(triton, name)
        strange = [wish for wish in wishes if wish not in declared]
        for wish in strange:
            self._refusal(triton, name, self.prompts[0], names=wish, **{wish: _WISHES[wish]})
            self._goes_on(triton, name)
        if strange:
            pytest.skip(f"no component declares {', '.join(strange)}, and it is refused")

    def _generate(self, triton: LiveTriton, name: str, prompt: Any, **asked: Any) -> Any:
        try:
            return triton.client.generate(name, prompt, **asked)
        except LLMServeError as error:
            given = ", ".join(f"{key}={value!r}" for key, value in asked.items())
            self._verdict.error(f"answering {str(prompt)[:60]!r} with {given}", error)

    def _ask(self, triton: LiveTriton, name: str, prompt: str) -> tuple[str, Any, Any]:
        answer = self._generate(triton, name, prompt, max_tokens=16)
        return answer.text, answer.finish_reason, answer.output_tokens

    def _stream(
        self, triton: LiveTriton, name: str, prompt: str, asked: dict[str, Any]
    ) -> tuple[str, str | None]:
        try:
            pieces = list(triton.client.stream(name, prompt, **asked))
        except LLMServeError as error:
            self._verdict.error(f"streaming an answer to {prompt!r}", error)
        reason = pieces[-1].finish_reason if pieces else None
        return "".join(piece.text for piece in pieces), reason

    def _refusal(
        self, triton: LiveTriton, name: str, prompt: str, *, names: str, **asked: Any
    ) -> str:
        """Return how a request is refused; fail if it is not, or not so that it helps."""
        try:
            answer = triton.client.generate(name, prompt, **asked)
        except RequestRejectedError as error:
            return self._is_refusal(str(error), names=names)
        except LLMServeError as error:
            self._verdict.error(f"refusing {prompt[:40]!r} with {asked}", error)
        return self._is_refusal(None, names=names, got=f"an answer: {answer.text!r}")

    def _is_refusal(self, message: str | None, *, names: str, got: str = "no error") -> str:
        if message is None or names not in message or "\n" in message or "Traceback" in message:
            self._verdict.fail(
                f"an error of one line that names {names!r}",
                got if message is None else message,
                promise="what cannot be served is refused",
                looks=("batching", "tokenizer"),
            )
        return message

    def _needs_context(self, triton: LiveTriton, name: str) -> None:
        """Leave a test of the context's end where there is none.

        A request without end is refused where there is one, and would otherwise never be done.
        """
        if name not in self._unlimited:
            try:
                asked = {"max_tokens": 2**31 - 1, "timeout": _SECONDS_WITHOUT_END}
                triton.client.generate(name, self.prompts[0], **asked)
                self._unlimited[name] = True
            except RequestTimeoutError:
                self._unlimited[name] = True
            except LLMServeError:
                self._unlimited[name] = False
        if self._unlimited[name]:
            pytest.skip("its generator has no context_length")

    def _prompt_of(self, tokens: int, triton: LiveTriton, name: str) -> str:
        """Return a prompt of so many tokens, or a few less."""
        counts = [
            self._generate(triton, name, "so " * n, max_tokens=1).input_tokens or 0
            for n in (10, 20)
        ]
        each = (counts[1] - counts[0]) / 10
        # A tokenizer that counts nothing breaks other promises, and need not end in a division.
        return "so " * int(10 + (tokens - counts[0]) / max(each, 0.1))

    def _goes_on(self, triton: LiveTriton, name: str) -> None:
        answer = self._generate(triton, name, self.prompts[0], max_tokens=4)
        if not answer.output_tokens:
            self._verdict.fail(
                "an answer after a refusal", answer, promise="a refusal ends nothing", looks=WORK
            )


def at_once(ask: Callable[[A], B], asked: Sequence[A]) -> list[B]:
    """Ask everything at the same time and return the answers in order."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, asked))
