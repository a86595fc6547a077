"""The base of the conformance tests: sends requests to a served recipe, and reports failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import pytest

from llmserve.builder.build import BuildResult
from llmserve.builder.fitted import build
from llmserve.errors import LLMServeError, RequestRejectedError, RequestTimeoutError
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import ROLES
from llmserve.repository.repository import Model
from llmserve.testing.live import LiveTriton

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
GENERATION = ("generator", "batching")
TEXT = ("tokenizer", "formatter")
ALL_ROLES = (*TEXT, *GENERATION)
_MAX_LENGTH = 300
_ENDLESS_TIMEOUT = 5.0
# Values that any model with the option accepts.
_OPTION_VALUES: Mapping[str, Any] = {
    "temperature": 1.0,
    "seed": 7,
    "ignore_eos": True,
    "exclude_input_in_output": False,
}


class RecipeChecks:
    """Builds a recipe, sends it requests, and reports failures that its author can act on.

    ``roles`` are the roles whose components are the most likely cause of a failure.
    """

    recipe: ClassVar[str]
    model: ClassVar[str] = "demo"
    options: ClassVar[Mapping[str, Any]] = {}
    prompts: ClassVar[Sequence[str]] = PROMPTS
    _unlimited: ClassVar[dict[str, bool]] = {}
    _alone: ClassVar[dict[tuple[str, str], tuple[str, Any, Any]]] = {}

    def _build(self, name: str, output: Path) -> BuildResult:
        try:
            return build(self.recipe, self.model, name=name, output=output, **self.options)
        except LLMServeError as error:
            self._error(f"building {self.model}", error)

    def _declared(self, triton: LiveTriton, name: str) -> frozenset[str]:
        """Return the inputs that the components of a model declare."""
        manifest = Model(triton.repository / name).intact()
        return frozenset(manifest.contract["inputs"] if manifest else ())

    def _needs_options(self, triton: LiveTriton, name: str, *options: str) -> None:
        """Skip a test of options that no component declares, if they are refused."""
        undeclared = [option for option in options if option not in self._declared(triton, name)]
        for option in undeclared:
            value = {option: _OPTION_VALUES[option]}
            self._refused(triton, name, self.prompts[0], names=option, **value)
            self._still_answers(triton, name)
        if undeclared:
            pytest.skip(f"no component declares {', '.join(undeclared)}, and it is refused")

    def _needs_context(self, triton: LiveTriton, name: str) -> None:
        """Skip a test of the context limit if there is none.

        With a limit, an endless request is refused; without one, it would never finish.
        """
        if name not in self._unlimited:
            options = {"max_tokens": 2**31 - 1, "timeout": _ENDLESS_TIMEOUT}
            try:
                triton.client.generate(name, self.prompts[0], **options)
                self._unlimited[name] = True
            except LLMServeError as error:
                self._unlimited[name] = isinstance(error, RequestTimeoutError)
        if self._unlimited[name]:
            pytest.skip("its generator has no context_length")

    def _generate(self, triton: LiveTriton, name: str, prompt: Any, **options: Any) -> Any:
        try:
            return triton.client.generate(name, prompt, **options)
        except LLMServeError as error:
            listed = ", ".join(f"{key}={value!r}" for key, value in options.items())
            self._error(f"answering {str(prompt)[:60]!r} with {listed}", error)

    def _answer(self, triton: LiveTriton, name: str, prompt: str) -> tuple[str, Any, Any]:
        answer = self._generate(triton, name, prompt, max_tokens=16)
        return answer.text, answer.finish_reason, answer.output_tokens

    def _answers_alone(
        self, triton: LiveTriton, name: str, prompts: Sequence[str]
    ) -> list[tuple[str, Any, Any]]:
        """Return the answers to prompts that are sent one by one, which many tests compare with.

        Each is asked for once: its answer may not change later either.
        """
        for prompt in prompts:
            if (name, prompt) not in self._alone:
                self._alone[name, prompt] = self._answer(triton, name, prompt)
        return [self._alone[name, prompt] for prompt in prompts]

    def _stream(
        self, triton: LiveTriton, name: str, prompt: str, options: dict[str, Any]
    ) -> tuple[str, str | None]:
        try:
            pieces = list(triton.client.stream(name, prompt, **options))
        except LLMServeError as error:
            self._error(f"streaming an answer to {prompt!r}", error)
        reason = pieces[-1].finish_reason if pieces else None
        return "".join(piece.text for piece in pieces), reason

    def _refused(
        self, triton: LiveTriton, name: str, prompt: str, *, names: str, **options: Any
    ) -> str:
        """Return the error of a request; fail if there is none or it does not help the user."""
        try:
            answer = triton.client.generate(name, prompt, **options)
        except RequestRejectedError as error:
            return self._check_refusal(str(error), names=names)
        except LLMServeError as error:
            self._error(f"refusing {prompt[:40]!r} with {options}", error)
        return self._check_refusal(None, names=names, got=f"an answer: {answer.text!r}")

    def _check_refusal(self, message: str | None, *, names: str, got: str = "no error") -> str:
        if message is None or names not in message or "\n" in message or "Traceback" in message:
            self._fail(
                f"a one-line error that contains {names!r}",
                got if message is None else message,
                promise="a request that cannot be served is refused",
                roles=("batching", "tokenizer"),
            )
        return message

    def _still_answers(self, triton: LiveTriton, name: str) -> None:
        answer = self._generate(triton, name, self.prompts[0], max_tokens=4)
        if not answer.output_tokens:
            promise = "the model still answers after refusing a request"
            self._fail("an answer", answer, promise=promise)

    def _prompt_of(self, tokens: int, triton: LiveTriton, name: str) -> str:
        """Return a prompt of this many tokens, or slightly fewer."""
        counts = [
            self._generate(triton, name, "so " * n, max_tokens=1).input_tokens or 0
            for n in (10, 20)
        ]
        per_word = (counts[1] - counts[0]) / 10
        # A tokenizer that counts nothing fails other tests; it must not divide by zero here.
        return "so " * int(10 + (tokens - counts[0]) / max(per_word, 0.1))

    def _fail(
        self, expected: object, got: object, *, promise: str, roles: Sequence[str] = GENERATION
    ) -> NoReturn:
        lines = [
            f"{self._subject()} breaks a promise: {promise}",
            f"  expected: {_shortened(expected)}",
            f"  got:      {_shortened(got)}",
            *(f"  look at:  {component}" for component in self._components(roles)),
        ]
        # Without a traceback, which would only contain code of this test suite.
        pytest.fail("\n".join(lines), pytrace=False)

    def _expect(
        self, expected: A, got: A, *, promise: str, roles: Sequence[str] = GENERATION
    ) -> None:
        if got != expected:
            self._fail(expected, got, promise=promise, roles=roles)

    def _expect_each(
        self,
        prompts: Sequence[str],
        expected: Sequence[A],
        got: Sequence[A],
        *,
        promise: str,
        roles: Sequence[str] = GENERATION,
    ) -> None:
        """Fail at the first prompt whose answer differs."""
        self._expect(len(expected), len(got), promise=f"{promise}: one each", roles=roles)
        for prompt, want, answer in zip(prompts, expected, got, strict=True):
            self._expect(want, answer, promise=f"{promise} (prompt {prompt!r})", roles=roles)

    def _error(self, doing: str, error: LLMServeError) -> NoReturn:
        """Fail because llmserve or the server refused a valid request."""
        message = f"{self._subject()}: {doing} failed with {type(error).__name__}: {error}"
        # Without the original error, which pytest would print a second time.
        raise pytest.fail.Exception(message, pytrace=False) from None

    def _subject(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        suffix = f" with {options}" if options else ""
        registry = Registry.load()
        try:
            owner = registry.plugin_of(registry.recipe(self.recipe))
        except LLMServeError:
            return f"recipe {self.recipe!r}{suffix}"
        return f"recipe {self.recipe!r} of plugin {owner}{suffix}"

    def _components(self, roles: Sequence[str]) -> list[str]:
        registry = Registry.load()
        components = []
        try:
            for role in roles:
                name = self.options.get(role) or getattr(registry.recipe(self.recipe), role)
                component: Any = registry.get(ROLES[role], name)
                owner = registry.plugin_of(component)
                components.append(f"{role} {name!r}, {component.runtime}, of plugin {owner}")
        except LLMServeError as error:
            return [str(error)]
        return components


def all_at_once(function: Callable[[A], B], arguments: Sequence[A]) -> list[B]:
    """Call a function with all arguments concurrently; return the results in order."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(function, arguments))


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}… ({len(text)} characters)"
