"""How processes end, in words, and whether the next one may fare better."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from llmserve.server.run.guard import name_of_signal


@dataclass(frozen=True)
class End:
    """The end of a process: its exit code, or the signal that ended it.

    >>> str(End(code=1))
    'exit code 1'
    """

    code: int = 0
    signal: int = 0
    of_memory: bool = False
    """Whether the system has killed it, or one beside it, since memory ran out."""

    @classmethod
    def of_status(cls, status: int, *, of_memory: bool) -> End:
        """Return the end that a wait status describes."""
        if os.WIFSIGNALED(status):
            return cls(signal=(number := os.WTERMSIG(status)),
                       of_memory=of_memory and number == signal.SIGKILL)  # fmt: skip
        return cls(code=os.WEXITSTATUS(status))

    @property
    def may_be_chance(self) -> bool:
        """Whether it says nothing against the program: on a busy machine, any may end like this."""
        return not self.signal

    def __str__(self) -> str:
        if self.of_memory:
            return "killed by the system, which has too little memory"
        return (
            f"killed by {name_of_signal(self.signal)}" if self.signal else f"exit code {self.code}"
        )
