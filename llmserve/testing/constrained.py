"""The suite for recipes whose formatter can hold an answer to a form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from llmserve.testing.asking import at_once
from llmserve.testing.conformance import RecipeConformance
from llmserve.testing.live import LiveTriton

_LOOKS = ("formatter", "generator")
_LENGTH = 24


class ConstrainedConformance(RecipeConformance):
    """All that :class:`RecipeConformance` holds a recipe to, and that constrained answers fit.

    ``constrained`` is the wish that asks for the form.

    >>> class TestAcme(ConstrainedConformance):
    ...     recipe = "acme"
    ...     constrained = {"response_format": "json_object"}
    ...
    ...     def fits(self, text: str) -> bool:
    ...         return text.startswith("{")
    """

    constrained: ClassVar[Mapping[str, Any]]

    def fits(self, text: str) -> bool:
        """Say whether an answer has the form that ``constrained`` asks for."""
        raise NotImplementedError

    def test_constrained_answers_fit(self, triton: LiveTriton, name: str) -> None:
        """Alone, beside others that are free, drawn or greedy: each has the form."""
        drawn = {"temperature": 1.0, "seed": 7}
        for wish in [{}, drawn] if drawn.keys() <= self._declared(triton, name) else [{}]:
            held = {**self.constrained, **wish, "max_tokens": _LENGTH}
            alone = [self._generate(triton, name, p, **held) for p in self.prompts]
            free = [self._ask(triton, name, p) for p in self.prompts]
            for prompt, answer in zip(self.prompts, alone, strict=True):
                self._fits(prompt, answer.text)
            asked = [(prompt, either) for prompt in self.prompts for either in (True, False)]

            def ask(one: tuple[str, bool], held: dict[str, Any] = held) -> Any:
                prompt, holds = one
                if holds:
                    return self._generate(triton, name, prompt, **held)
                return self._ask(triton, name, prompt)

            together = at_once(ask, asked)
            promise = "a constrained answer beside others is the one that it is alone"
            looks = ("generator", "formatter", "batching")
            told = [(a.text, a.finish_reason) for a in alone]
            beside = [(a.text, a.finish_reason) for a in together[::2]]
            self._verdict.each_same(self.prompts, told, beside, promise=promise, looks=looks)
            promise = "an answer beside constrained ones is free"
            self._verdict.each_same(
                self.prompts, free, together[1::2], promise=promise, looks=looks
            )

    def test_pieces_of_a_constrained_answer_join_to_it(self, triton: LiveTriton, name: str) -> None:
        """What streams has the form as well."""
        held = {**self.constrained, "max_tokens": _LENGTH}
        for prompt in self.prompts[:3]:
            self._fits(prompt, self._stream(triton, name, prompt, held)[0])

    def _fits(self, prompt: str, text: str) -> None:
        try:
            fits = self.fits(text)
        except ValueError:
            fits = False
        if not fits:
            self._verdict.fail(
                f"an answer to {prompt!r} that fits",
                text,
                promise=f"with {dict(self.constrained)} an answer has the form that it asks for",
                looks=_LOOKS,
            )
