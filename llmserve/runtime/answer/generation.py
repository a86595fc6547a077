"""The state of one answer. Generators push tokens into it, and it decides when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime.answer.logprobs import Logprob, logprob_of
from llmserve.runtime.answer.params import Params
from llmserve.runtime.answer.text import IncrementalDecoder, StopScanner
from llmserve.runtime.errors import RequestError

Constraint = Callable[[npt.NDArray[Any]], None]
"""A constraint on one answer: it sets the scores of all tokens that must not come next to -inf.
The tokens chosen so far are in ``token_ids`` of the generation that it was created for. An optional
method ``forced()`` returns the tokens that must come next, if the constraint knows them. A
constraint that takes time to prepare has ``pending``, whether it is not ready yet, and
``settle()``, which waits for it and raises ``RequestError`` if it cannot be enforced."""

STOP = "stop"
LENGTH = "length"
CANCELLED = "cancelled"
FAILED = "failed"
"""Of an answer that is an error; no client sees it."""


class Generation:
    """The state of one answer, from its prompt's ids to its text and finish reason.

    A generator reads ``prompt_ids``, ``params`` and ``max_tokens``, calls :meth:`push` with each
    token it generates, and also its logits if :attr:`wants_logits`, and stops when :attr:`done`.
    A generation that is not :attr:`plain` needs a :class:`~llmserve.runtime.Sampler`, or
    other sampling code that calls :meth:`constrain`. A generator that answers with values instead
    of tokens calls :meth:`finish` with the one that it has computed of the prompt.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: Params,
        *,
        max_tokens: int,
        eos_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        prompt: str = "",
        segments: Sequence[int] | None = None,
        images: Any = None,
        scored: Sequence[int] = (),
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.prompt = prompt
        self.prompt_ids = list(prompt_ids)
        self.segments = segments
        """Which text of a pair each token belongs to, for models that distinguish them."""
        self.images = images
        """What the generator's ``read_images`` has made of the images of the prompt; what an
        :class:`~llmserve.runtime.Engine` computes has its :class:`~llmserve.runtime.Embedded`."""
        self.scored = tuple(scored)
        """The tokens whose log-probabilities the request wants instead of the likeliest."""
        self.params = params
        self.max_tokens = max_tokens
        self.eos_ids = eos_ids
        self.token_ids: list[int] = []
        self.value: npt.NDArray[np.float32] | None = None
        self.error: Exception | None = None
        self.logprobs: list[Logprob] = []
        self.total_logprob = 0.0
        self.prompt_logprobs: list[Logprob] = []
        if params.prompt_logprobs is not None and prompt_ids:
            # Nothing precedes the first token, so it has no probability.
            self.prompt_logprobs.append(Logprob(self.prompt_ids[0], math.nan))
        self.finish_reason: str | None = None
        self.cached_tokens: int | None = None
        """How many of the prompt's tokens the generator did not compute, if it knows."""
        self.on_text: Callable[[], None] | None = None
        self.taken = False
        self.tokens_reported = 0
        self.constraint: Constraint | None = None
        self._constrained_at = 0
        self._is_cancelled = is_cancelled
        self._decoder = IncrementalDecoder(decode, prompt_ids)
        self._scanner = StopScanner(params.stop_words, keep=params.include_stop_str_in_output)
        self._text = ""
        self._undecoded: list[int] = []
        self._taken = 0
        self._taken_logprobs = 0

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        self._decode()
        return self._text

    @property
    def wants_logits(self) -> bool:
        return self.params.logprobs_count is not None

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether to call :meth:`push_prompt` for the prompt's next token."""
        return 0 < len(self.prompt_logprobs) < len(self.prompt_ids)

    @property
    def plain(self) -> bool:
        """Whether the next token is always the likeliest one, with no score changed."""
        return self.constraint is None and self.params.plain

    @property
    def pending(self) -> bool:
        """Whether its constraint is not ready yet: a driver can serve others meanwhile."""
        return bool(getattr(self.constraint, "pending", False))

    def settle(self) -> None:
        """Wait until its constraint is ready; raise ``RequestError`` if that is refused."""
        if settle := getattr(self.constraint, "settle", None):
            settle()

    def constrain(self, scores: npt.NDArray[Any]) -> None:
        """Set the scores of tokens that must not come next to minus infinity.

        A caller that finds no token left raises :class:`RequestError`, as a ``Sampler`` does.
        """
        if self.constraint is not None:
            self.constraint(scores)
            self._constrained_at = len(self.token_ids) + 1

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next whatever the scores; usually there are none."""
        forced = getattr(self.constraint, "forced", None)
        tokens: Sequence[int] = forced() if forced else ()
        self._constrained_at = max(self._constrained_at, len(self.token_ids) + len(tokens))
        return tokens

    def push(
        self,
        token_id: int,
        logits: npt.NDArray[Any] | None = None,
        *,
        logprob: Logprob | None = None,
    ) -> None:
        """Add the next token. After the end, further tokens from a running batch are ignored.

        ``logits`` are the model's unmodified ones, one for each token of the vocabulary. An engine
        that keeps them to itself passes the token's ``logprob`` instead.
        """
        if self.done:
            return
        if self._is_cancelled():
            self.cancel()
            return
        if self.constraint is not None and self._constrained_at <= len(self.token_ids):
            raise RuntimeError("the generator chose a token without calling constrain()")
        self.token_ids.append(token_id)
        if self.params.logprobs_count is not None and logits is not None:
            count = self.params.logprobs_count
            logprob = logprob_of(logits, token_id, count, self.scored)
        if self.params.logprobs_count is not None and logprob is not None:
            self.logprobs.append(logprob)
            self.total_logprob += logprob.value
        early = len(self.token_ids) < self.params.min_tokens
        if token_id in self.eos_ids and not self.params.ignore_eos and not early:
            self._finish(STOP)
            return
        self._undecoded.append(token_id)
        if self.params.stop_words:
            self._decode(early=early)
        if self._scanner.hit:
            self._finish(STOP)
        elif len(self.token_ids) >= self.max_tokens:
            self._finish(LENGTH)
        elif self.on_text:
            self.on_text()

    def push_prompt(
        self, logits: npt.NDArray[Any] | None = None, *, logprob: Logprob | None = None
    ) -> None:
        """Add the logits from which the prompt's next token would have been chosen.

        As in :meth:`push`, ``logprob`` stands for them.
        """
        if logits is not None:
            token = self.prompt_ids[len(self.prompt_logprobs)]
            logprob = logprob_of(logits, token, self.params.prompt_logprobs or 0)
        if logprob is None:
            raise TypeError("push_prompt takes logits or a logprob")
        self.prompt_logprobs.append(logprob)

    def finish(self, value: npt.NDArray[np.float32]) -> None:
        """End with a value instead of tokens; one that is no number fails this answer alone."""
        if self.done:
            return
        if self._is_cancelled():
            self.cancel()
        elif np.isfinite(value).all():
            self.value = value
            self._end(STOP)
        else:
            problem = "the model computed something that is no number for this text"
            self.fail(RequestError(problem, code="not_a_number"))

    def fail(self, error: Exception) -> None:
        """End this answer with an error, and the request with it, but no other request."""
        if not self.done:
            self.error = error
            self._end(FAILED)

    def tell(self, text: str) -> None:
        """End with a text that did not come from a generator."""
        self._append(text)
        self._finish(STOP)

    def end(self) -> None:
        """End without an end token: some engines do not return it."""
        if not self.done:
            self._finish(STOP)

    def cancel(self) -> None:
        if not self.done:
            # No client reads the text, and decoding the rest of it could fail.
            self._end(CANCELLED)

    @property
    def has_news(self) -> bool:
        """Whether there is text that :meth:`take` has not returned yet."""
        self._decode()
        return self._taken < len(self._text)

    def take_logprobs(self) -> list[Logprob]:
        """Return the log-probabilities of the tokens since the last call."""
        new = self.logprobs[self._taken_logprobs :]
        self._taken_logprobs = len(self.logprobs)
        return new

    def take(self) -> str:
        """Return the text since the last call."""
        self._decode()
        piece = self._text[self._taken :]
        self._taken = len(self._text)
        self.taken = True
        return piece

    def rewind(self) -> None:
        """Let the next piece begin with the answer again."""
        self.taken = False
        self._taken = self._taken_logprobs = self.tokens_reported = 0

    def _decode(self, *, early: bool = False) -> None:
        """Decode the pending tokens; in ``early`` ones, stop words are not searched for.

        Decoding many tokens at once takes hardly longer than decoding one, so decoding waits until
        the text is needed or may contain a stop word.
        """
        new, self._undecoded = self._undecoded, []
        if new:
            piece = self._decoder.push(*new)
            self._append(piece if early else self._scanner.push(piece))

    def _finish(self, reason: str) -> None:
        self._decode()
        rest = self._scanner.push(self._decoder.flush())
        self._append(rest if self._scanner.hit else rest + self._scanner.flush())
        self._end(STOP if self._scanner.hit else reason)

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        if self.on_text:
            self.on_text()

    def _append(self, piece: str) -> None:
        # Python appends in place to a string with a single reference; otherwise it copies it all.
        text, self._text = self._text, ""
        text += piece
        self._text = text
