"""Compiles the constraints of a model away from its steps, and keeps the most recent ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.contract.options import OPTIONS
from llmserve.runtime.answer.judge import Judge, UnenforceableError, compiled
from llmserve.runtime.answer.limited_process import SetupError
from llmserve.runtime.errors import RequestError
from llmserve.runtime.protocols import Tokenizer

_MAX_COMPILED, _MAX_BYTES = 64, 64 << 20
"""How many forms are kept, and how large they may be together; the newest is kept anyhow."""
# Most forms take a few milliseconds, so there is no such queue unless someone wants one.
_MAX_WAITING = 32

Form = tuple[str, str]
"""The kind of a constraint, and its text."""


@dataclass(frozen=True)
class Compiled:
    """A form as llguidance has it, to be copied for each answer, and the size of its masks."""

    matcher: Any
    vocabulary: int
    size: int
    """The bytes that it took in the judge's process."""


class Compiler:
    """Compiles the forms of one model in a thread of its own.

    llguidance releases Python's lock while it compiles, so that the model's steps continue.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        self._library = _llguidance()
        if not eos_ids:
            raise _unsupported("this model has no end token: its answers cannot be constrained")
        tokenizer_json = getattr(tokenizer, "tokenizer_json", lambda: None)()
        if tokenizer_json is None:
            raise _unsupported(
                "this model's answers cannot be constrained: its tokenizer has no tokenizer.json, "
                "which llguidance needs"
            )
        self._tokenizer_json, self._eos_token = tokenizer_json, min(eos_ids)
        self._table: Any = None
        self._judge: Judge | None = None
        self._refusal = ""
        self._thread = ThreadPoolExecutor(1, "llmserve-constraints")
        self._compiled: OrderedDict[Form, Future[Compiled]] = OrderedDict()

    def start(self, form: Form) -> Future[Compiled]:
        """Compile a form unless it is known; the result or the refusal comes later."""
        future = self._compiled.get(form)
        if future is None or _tells_nothing(future):
            waiting = sum(not future.done() for future in self._compiled.values())
            if waiting >= _MAX_WAITING:
                problem = "the queue of new constraints is full: send it again later"
                raise RequestError(problem, code="constraint_queue_full")
            future = self._compiled[form] = self._thread.submit(self._compile, form)
        self._compiled.move_to_end(form)
        self._drop_oldest()
        return future

    def _drop_oldest(self) -> None:
        """Drop the oldest forms while there are too many, or those that are compiled too large."""
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        sizes = [(form, _size(future)) for form, future in self._compiled.items()]
        held = sum(size for _, size in sizes)
        for form, size in sizes[:-1]:
            if size and held > _MAX_BYTES:
                del self._compiled[form]
                held -= size

    def _compile(self, form: Form) -> Compiled:
        problem: str | None = None
        try:
            grammar, size = self._judged(form)
            if self._table is None:
                eos_token = self._eos_token
                self._table = self._library.LLTokenizer(self._tokenizer_json, eos_token=eos_token)
            matcher = compiled(self._library, self._table, grammar)
        except UnenforceableError as error:
            problem = str(error)
        if problem is not None:
            # Raised here, the refusal that is kept does not keep what was compiled so far.
            raise refusal(form[0], problem)
        return Compiled(matcher, self._table.vocab_size, size)

    def close(self) -> None:
        """End the thread and the judge; forms that wait are dropped.

        Otherwise the process would compile them before it ends.
        """
        self._thread.shutdown(cancel_futures=True)
        if self._judge is not None:
            self._judge.close()

    def _judged(self, form: Form) -> tuple[str, int]:
        if self._refusal:
            raise _unsupported(self._refusal)
        # The machine may have had no memory left for it: another one is started.
        for _ in range(2):
            try:
                if self._judge is None:
                    library = Path(self._library.__file__).parent.parent
                    self._judge = Judge(self._tokenizer_json, self._eos_token, library)
                return self._judge.grammar(*form)
            except SetupError as error:
                reason = next(iter(str(error).splitlines()), "")
                self._refusal = (
                    "this model's answers cannot be constrained: llguidance refuses its tokenizer: "
                    f"{reason[:200]}"
                )
                raise _unsupported(self._refusal) from None
            except OSError:
                if self._judge is not None:
                    self._judge.close()
                    self._judge = None
        problem = "this constraint could not be checked: send it again"
        raise RequestError(problem, code="constraint_not_checked")


def _size(future: Future[Compiled]) -> int:
    """Return the bytes of a form, none if it is refused or not compiled yet."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        return 0
    return future.result().size


def _tells_nothing(future: Future[Compiled]) -> bool:
    """Return whether compiling has failed for a reason that is not the form's."""
    error = future.exception() if future.done() else None
    refused = isinstance(error, RequestError) and error.code != "constraint_not_checked"
    return error is not None and not refused


def refusal(kind: str, message: str) -> RequestError:
    """Return the error for a form that cannot be enforced, with one line of the reason."""
    lines: Sequence[str] = [line.strip() for line in message.splitlines() if line.strip()]
    reason = lines[0] if lines else "it cannot be compiled"
    if reason.endswith(":"):
        reason = f"{reason} {lines[-1]}"
    problem = f"the {kind.replace('_', ' ')} cannot be enforced: {reason[:200]}"
    return RequestError(problem, code="invalid_value", param=kind if kind in OPTIONS else None)


def _unsupported(problem: str) -> RequestError:
    # It is the same for every option that constrains an answer, whichever was sent.
    return RequestError(problem, code="unsupported_option")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise _unsupported(
            "this server cannot constrain answers: install llguidance next to it "
            "(llmserve[constrained] adds it)"
        ) from None
    return llguidance
