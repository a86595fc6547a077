"""How far a server has come, and what stopped it: read from its log.

The log is the only source while models load, since Triton opens its ports afterwards.
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
# What a model's process has to tell whoever serves it.
_NOTE = re.compile(r"llmserve: note: (?P<note>.+)$")
_PROBLEM = re.compile(r'^E\d{4} [\d:.]+ \d+ \S+\] "?(?P<reason>.+?)"?$')
_CATEGORY = re.compile(
    r"^(?:load failed for model '.+?': version \d+ is at UNAVAILABLE state: )?"
    r"(?:(?:Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown): )?"
)
_UNREADABLE = re.compile(r"failed to read text proto from \S+")
# After this, Triton waits for ever for a stub that has ended.
_STUCK = re.compile(r"Failed to preinitialize Python stub: (?P<reason>.+)$")


_TAIL = 5


@dataclass(frozen=True)
class Progress:
    """What a start has come to: ``elapsed`` seconds, the models still loading, the ready ones."""

    elapsed: float
    loading: tuple[str, ...]
    ready: tuple[str, ...]

    def __str__(self) -> str:
        """Say what is going on, for who waits.

        >>> print(Progress(2.0, loading=("gpt2",), ready=()))
        loading gpt2
        """
        if self.loading:
            return f"loading {', '.join(self.loading)}"
        return "waiting until it is ready" if self.ready else "starting Triton"


class ServerLog:
    """The log of a server that is starting, read on as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # An older server may have written to the same file.
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self._models: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.loads: Counter[str] = Counter()
        """How often each model was loaded."""
        self.tail: deque[str] = deque(maxlen=_TAIL)
        """The last lines."""
        self.port_lost: str | None = None
        """Which of ``http``, ``grpc`` and ``metrics`` could not be listened on."""
        self.stuck: str | None = None
        """Why it will neither be ready nor end."""
        self.notes: list[str] = []
        """What models said at load that whoever serves them should know."""
        self._fatal: str | None = None
        self._problem: str | None = None

    def read(self) -> None:
        """Take in the lines written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace").rstrip())

    def progress(self, elapsed: float) -> Progress:
        loading = tuple(name for name, state in self._models.items() if state == "loading")
        ready = tuple(name for name, state in self._models.items() if state == "ready")
        return Progress(elapsed, loading, ready)

    def why_it_ended(self) -> str | None:
        """Return what says most: the last error, Triton's own summary, or the last line."""
        return self._problem or self._fatal or (self.tail[-1] if self.tail else None)

    def _take(self, line: str) -> None:
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
    r"""Return a reason as Triton gives it without its escapes, its traceback and its category.

    >>> in_plain_words(r"Internal: ModuleNotFoundError: No module named 'acme'\n\nAt:\n  m.py(1)")
    "ModuleNotFoundError: No module named 'acme'"
    """
    message = reason.replace("\\n", "\n").split("\n\nAt:\n")[0]
    if "shared memory key" in message:
        return "too little room in /dev/shm"
    message = message.replace("is not healthy.", "stood still for a second, or ended")
    message = _UNREADABLE.sub("this Triton cannot read its config.pbtxt", message)
    return " ".join(_CATEGORY.sub("", message).split()).rstrip(" ;")
