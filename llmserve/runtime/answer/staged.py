"""Constrains the parts of an answer: not the model's thinking, and a tool call by its own form.

An answer may begin with thinking, which no form applies to, but a budget may. After it comes the
answer proper: in its form, or a call if it begins with the mark of one. Without a form it is free
text, in which each mark of a call may begin one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from llmserve.runtime.answer.generation import Generation
from llmserve.runtime.answer.text import REPLACEMENT
from llmserve.runtime.errors import RequestError
from llmserve.runtime.protocols import Tokenizer

_MAX_UNFINISHED = 3
"""A character that is not finished within so many tokens never will be."""
_MAX_MARK = 128
"""The most tokens of a mark."""
_BEFORE_THINKING = 4
"""The most tokens of white space before the mark that begins the thinking."""

Part = Literal["thinking", "form", "text", "call"]


class PartialConstraint(Protocol):
    """A constraint that can begin in the middle of an answer."""

    @property
    def pending(self) -> bool: ...
    @property
    def complete(self) -> bool: ...
    def settle(self) -> None: ...
    def begin(self, ids: Sequence[int] = ()) -> None: ...
    def forced(self) -> Sequence[int]: ...
    def __call__(self, scores: npt.NDArray[Any]) -> None: ...


class _Mark:
    """A text that ends one part of an answer and begins another."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self.text = text
        self.ids = list(tokenizer.encode(text, special=False))
        if not self.ids:
            raise RequestError(f"the mark {text!r} has no tokens", code="invalid_value")
        self._decode = tokenizer.decode
        self._window = min(len(text.encode()) + 1, _MAX_MARK)

    def found(self, ids: Sequence[int]) -> str | None:
        """Return what follows the mark in the last of these tokens; None if it is not there."""
        if list(ids[-len(self.ids) :]) == self.ids:
            return ""
        if len(self.ids) == 1:
            return None
        # After other text, it may be split into other tokens.
        _, found, rest = self._decode(ids[-self._window :]).rpartition(self.text)
        return rest if found else None


class StagedConstraint:
    """Follows an answer through its parts, and applies to each what is meant for it."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        form: PartialConstraint | None,
        new_call: Callable[[], PartialConstraint] | None,
    ) -> None:
        params = generation.params
        self._generation, self._tokenizer = generation, tokenizer
        self._form, self._new_call = form, new_call
        self._budget = params.thinking_token_budget
        self._call = new_call() if new_call else None
        self._waits = [each for each in (form, self._call) if each is not None]
        self._call_marks = [_Mark(mark, tokenizer) for mark in params.call_marks]
        self._end, self._begin, self._closing = self._thinking(params.thinking_marks)
        self._consumed = self._start = len(generation.token_ids)
        self._others: list[tuple[_Mark, Part]] = []
        """The marks that may still begin something else than the form, and what."""
        self._part: Part = "text"
        if self._end and (self._begin is None or self._has_begun()):
            self._part = "thinking"
        else:
            self._answer(may_think=True)

    def _thinking(self, marks: Sequence[str]) -> tuple[_Mark | None, _Mark | None, list[int]]:
        if not marks:
            return None, None, []
        end, close, begin = (*marks, *(marks[:1] if len(marks) < 2 else ()), "")[:3]
        closing = list(self._tokenizer.encode(close, special=False))
        new = _Mark(begin, self._tokenizer) if begin else None
        return _Mark(end, self._tokenizer), new, closing

    def _has_begun(self) -> bool:
        """Return whether the prompt ends with the beginning of the thinking."""
        prompt_end = self._tokenizer.decode(self._generation.prompt_ids[-_MAX_MARK:])
        return self._begin is not None and prompt_end.rstrip().endswith(self._begin.text)

    @property
    def pending(self) -> bool:
        return any(constraint.pending for constraint in self._waits)

    def settle(self) -> None:
        for constraint in self._waits:
            constraint.settle()

    def __call__(self, scores: npt.NDArray[Any]) -> None:
        self._catch_up()
        if closing := self._forced_end():
            _allow_only(scores, closing[:1])
        elif self._part == "thinking":
            if self._form is not None:
                # The answer in that form has yet to come.
                scores[[i for i in self._generation.eos_ids if i < scores.size]] = -np.inf
        elif self._part == "form":
            self._constrain(scores)
        elif self._part == "call" and self._call is not None:
            self._call(scores)

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next whatever the scores."""
        self._catch_up()
        if closing := self._forced_end():
            return closing
        if self._part == "form" and self._form is not None and not self._others:
            return self._form.forced()
        if self._part == "call" and self._call is not None:
            return self._call.forced()
        return ()

    def _constrain(self, scores: npt.NDArray[Any]) -> None:
        """Allow what the form allows, and at its beginning also the marks of something else."""
        at = self._consumed - self._start
        tokens = [mark.ids[at] for mark, _ in self._others if mark.ids[at] < scores.size]
        if at and tokens:
            # It is no beginning of the form, so the mark has to be finished.
            _allow_only(scores, tokens)
            return
        free = scores[tokens]
        if self._form is not None:
            self._form(scores)
        # A form that may begin with the first of a mark's tokens keeps it for itself.
        taken = {t for t in tokens if scores[t] > -np.inf}
        self._others = [
            other for other in self._others if other[0].ids[0] not in taken or not other[0].ids[1:]
        ]
        for token, score in zip(tokens, free, strict=True):
            scores[token] = score

    def _catch_up(self) -> None:
        """Look at the tokens that were chosen since the last time, one after the other."""
        look: dict[Part, Callable[[], None]] = {
            "thinking": self._in_thinking,
            "form": self._in_form,
            "text": self._in_text,
            "call": self._in_call,
        }
        while self._consumed < len(self._generation.token_ids):
            self._consumed += 1
            look[self._part]()

    def _so_far(self) -> Sequence[int]:
        """Return the tokens of this part, or the last of them."""
        start = max(self._start, self._consumed - _MAX_MARK)
        return self._generation.token_ids[start : self._consumed]

    def _enter(self, part: Part, rest: str = "") -> None:
        self._part, self._start, self._others = part, self._consumed, []
        if part == "call" and self._new_call:
            self._call = self._new_call()
            self._call.begin(self._ids(rest))

    def _answer(self, *, may_think: bool, rest: str = "") -> None:
        """Enter the answer proper, of which ``rest`` is there already."""
        self._enter("text" if self._form is None else "form")
        if may_think and self._begin:
            self._others.append((self._begin, "thinking"))
        if self._form is not None:
            ids = self._ids(rest)
            self._form.begin(ids)
            self._others += [(mark, "call") for mark in self._call_marks]
            self._others = [] if ids else self._others

    def _ids(self, rest: str) -> Sequence[int]:
        # White space between a mark and what follows it is no part of that.
        return self._tokenizer.encode(rest, special=False) if rest.strip() else ()

    def _in_thinking(self) -> None:
        if self._end and (rest := self._end.found(self._so_far())) is not None:
            self._answer(may_think=False, rest=rest)

    def _in_form(self) -> None:
        at = self._consumed - self._start - 1
        token = self._generation.token_ids[self._consumed - 1]
        self._others = [other for other in self._others if other[0].ids[at] == token]
        for mark, part in self._others:
            if len(mark.ids) == at + 1:
                self._enter(part)
                return

    def _in_text(self) -> None:
        tokens = self._so_far()
        for mark, part in self._others:
            if mark.found(tokens) is not None:
                self._enter(part)
                return
            if len(tokens) > len(mark.ids) + _BEFORE_THINKING:
                self._others = []
        for mark in self._call_marks if self._new_call else ():
            if (rest := mark.found(tokens)) is not None:
                self._enter("call", rest)
                return

    def _in_call(self) -> None:
        if self._call is not None and self._call.complete:
            self._enter("text")

    def _forced_end(self) -> Sequence[int]:
        """Return what is left of the end of a thinking that has used up its budget."""
        if self._budget is None or self._part != "thinking":
            return ()
        over = self._consumed - self._start - self._budget
        if over < 0 or (over < _MAX_UNFINISHED and self._is_unfinished()):
            return ()
        tokens = self._generation.token_ids
        written = min(over, len(self._closing) - 1)
        while tokens[len(tokens) - written :] != self._closing[:written]:
            written -= 1
        return self._closing[written:]

    def _is_unfinished(self) -> bool:
        """Return whether the last tokens end within a character."""
        last = self._generation.token_ids[-_MAX_UNFINISHED - 1 :]
        return bool(last) and self._tokenizer.decode(last).endswith(REPLACEMENT)


def _allow_only(scores: npt.NDArray[Any], tokens: Sequence[int]) -> None:
    kept = scores[list(tokens)]
    scores.fill(-np.inf)
    scores[list(tokens)] = kept
