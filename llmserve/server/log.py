"""Reads the progress of a starting server, and the reason it failed, from its log.

While models load, the log is the only source, since Triton opens its ports afterwards.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

_EVENT = re.compile(
    r"""\] \s "? (?:
        loading: \s (?P<loading>.+?) :\d+
      | successfully \s loaded \s '(?P<ready>.+?)'
      | (?: failed \s to \s load | Poll \s failed \s for \s model \s directory )
        \s '(?P<failed>.+?)' (?: \s version \s \d+ )? : \s (?P<reason>.+?)
    ) "? $""",
    re.VERBOSE,
)
_FATAL = re.compile(r"(?:error: creating server|/tritonserver): (?P<reason>.+)$")
_PORT_LOST = re.compile(r"failed to start (?P<port>HTTP|GRPC|Metrics) service: .*already in use")
# A message from a model's process to the operator.
_NOTE = re.compile(r"llmserve: note: (?P<note>.+)$")
_PROBLEM = re.compile(r'^E\d{4} [\d:.]+ \d+ \S+\] "?(?P<reason>.+?)"?$')
_CATEGORY = re.compile(
    r"^(?:load failed for model '.+?': version \d+ is at UNAVAILABLE state: )?"
    r"(?:(?:Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown): )?"
)
_UNREADABLE = re.compile(r"failed to read text proto from \S+")
# After this message, Triton waits forever for a stub that has ended.
_STUCK = re.compile(r"Failed to preinitialize Python stub: (?P<reason>.+)$")

_TAIL = 5


@dataclass(frozen=True)
class Progress:
    """The state of a start: ``elapsed`` seconds, the models still loading, and the ready ones."""

    elapsed: float
    loading: tuple[str, ...]
    ready: tuple[str, ...]

    def __str__(self) -> str:
        """Return the current activity for a progress display.

        >>> print(Progress(2.0, loading=("gpt2",), ready=()))
        loading gpt2
        """
        if self.loading:
            return f"loading {', '.join(self.loading)}"
        return "waiting until it is ready" if self.ready else "starting Triton"


class ServerLog:
    """The log of a starting server, read incrementally."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A previous server may have written to the same file.
        self._offset = path.stat().st_size if path.exists() else 0
        self._partial_line = b""
        self._models: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.loads: Counter[str] = Counter()
        """How often each model was loaded."""
        self.tail: deque[str] = deque(maxlen=_TAIL)
        """The last lines."""
        self.port_lost: str | None = None
        """The service, ``http``, ``grpc`` or ``metrics``, that could not listen on its port."""
        self.stuck: str | None = None
        """Why the server will neither become ready nor end."""
        self.notes: list[str] = []
        """Messages to the operator that models have logged while loading."""
        self._fatal: str | None = None
        self._problem: str | None = None

    def read(self) -> None:
        """Read the lines written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        *lines, self._partial_line = (self._partial_line + new).split(b"\n")
        for line in lines:
            self._parse(line.decode(errors="replace").rstrip())

    def progress(self, elapsed: float) -> Progress:
        loading = tuple(name for name, state in self._models.items() if state == "loading")
        ready = tuple(name for name, state in self._models.items() if state == "ready")
        return Progress(elapsed, loading, ready)

    def why_it_ended(self) -> str | None:
        """Return the best explanation: the last error, Triton's own summary, or the last line."""
        return self._problem or self._fatal or (self.tail[-1] if self.tail else None)

    def _parse(self, line: str) -> None:
        if line:
            self.tail.append(line)
        if event := _EVENT.search(line):
            state, name = next(
                (kind, event[kind]) for kind in ("loading", "ready", "failed") if event[kind]
            )
            self._models[name] = state
            self.loads[name] += state == "ready"
            if state == "failed":
                self.failures[name] = in_plain_words(event["reason"])
        elif note := _NOTE.search(line):
            self.notes.append(note["note"])
        elif stuck := _STUCK.search(line):
            self.stuck = in_plain_words(stuck["reason"])
        elif lost := _PORT_LOST.search(line):
            self.port_lost = lost["port"].lower()
        elif fatal := _FATAL.search(line):
            self._fatal = in_plain_words(fatal["reason"])
        elif (problem := _PROBLEM.match(line)) and "CudaDriverHelper" not in line:
            self._problem = in_plain_words(problem["reason"])


def in_plain_words(reason: str) -> str:
    r"""Return a reason from Triton's log without escapes, traceback and error category.

    >>> in_plain_words(r"Internal: ModuleNotFoundError: No module named 'acme'\n\nAt:\n  m.py(1)")
    "ModuleNotFoundError: No module named 'acme'"
    """
    message = reason.replace("\\n", "\n").split("\n\nAt:\n")[0]
    if "shared memory key" in message:
        return "too little space in /dev/shm"
    message = message.replace("is not healthy.", "did not respond for a second, or ended")
    message = _UNREADABLE.sub("this Triton cannot read its config.pbtxt", message)
    return " ".join(_CATEGORY.sub("", message).split()).rstrip(" ;")
