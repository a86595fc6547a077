"""What a failed promise looks like: whose it is, what was expected and what came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import pytest

from llmserve.errors import LLMServeError
from llmserve.roles import ROLES

T = TypeVar("T")
_LONGEST = 300


class Verdict:
    """Fails a test of one recipe in words that its author can act on.

    ``looks`` names the roles whose components are the likeliest to have broken the promise.
    """

    def __init__(self, recipe: str, options: Mapping[str, Any]) -> None:
        self._recipe = recipe
        self._options = options

    def fail(
        self, expected: object, got: object, *, promise: str, looks: Sequence[str]
    ) -> NoReturn:
        """End the test: no line of the suite's own code says more than this does."""
        pytest.fail(
            "\n".join(
                [
                    f"{self._whose()} breaks a promise: {promise}",
                    f"  expected: {_short(expected)}",
                    f"  got:      {_short(got)}",
                    *(f"  look at:  {part}" for part in self._parts(looks)),
                ]
            ),
            pytrace=False,
        )

    def same(
        self, expected: T, got: T, *, promise: str, looks: Sequence[str], of: str = ""
    ) -> None:
        """Fail unless both are the same; ``of`` says what they are answers to."""
        if got != expected:
            about = f" ({of})" if of else ""
            self.fail(expected, got, promise=promise + about, looks=looks)

    def each_same(
        self,
        prompts: Sequence[str],
        expected: Sequence[T],
        got: Sequence[T],
        *,
        promise: str,
        looks: Sequence[str],
    ) -> None:
        """Fail at the first prompt whose answer is another."""
        self.same(len(expected), len(got), promise=f"{promise}: one each", looks=looks)
        for prompt, one, other in zip(prompts, expected, got, strict=True):
            self.same(one, other, promise=promise, looks=looks, of=f"prompt {prompt!r}")

    def error(self, doing: str, error: LLMServeError) -> NoReturn:
        """Fail because llmserve or the server refused what they should not have."""
        told = f"{self._whose()}: {doing} failed with {type(error).__name__}: {error}"
        # Without the error that it tells of, which would stand before it once more.
        raise pytest.fail.Exception(told, pytrace=False) from None

    def _whose(self) -> str:
        changed = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        told = f" with {changed}" if changed else ""
        try:
            registry, recipe = self._found()
        except LLMServeError:
            return f"recipe {self._recipe!r}{told}"
        return f"recipe {self._recipe!r} of plugin {registry.plugin_of(recipe)}{told}"

    def _parts(self, roles: Sequence[str]) -> list[str]:
        try:
            registry, recipe = self._found()
            parts = []
            for role in roles:
                name = self._options.get(role) or getattr(recipe, role)
                component = registry.get(ROLES[role], name)
                owner = registry.plugin_of(component)
                parts.append(f"{role} {name!r}, {component.runtime}, of plugin {owner}")
        except LLMServeError as error:
            return [str(error)]
        return parts

    def _found(self) -> Any:
        from llmserve.registry import Registry

        registry = Registry.load()
        return registry, registry.recipe(self._recipe)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"
