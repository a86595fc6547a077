"""Reads the progress of a starting server, and the reason it failed, from its log.

While models load, the log is the only source, since Triton opens its ports afterwards.
"""

from __future__ import annotations

import os
import re
import time
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
_NO_GPU = re.compile(r"specifies invalid or unsupported gpu id (?P<number>\d+)")
# See workarounds.STUCK_STUB.
_STUCK = re.compile(r"Failed to preinitialize Python stub: (?P<reason>.+)$")
# Triton reports the model's failure only when the stub's process has ended.
_RAISED = re.compile(r"Failed to initialize Python stub: (?P<reason>.+)$")
# The last such path: the repository's own path, or a library's, may have the same form.
_MODEL_FILE = re.compile(r".*/models/(?P<model>[^/\s]+)/\d+/")
_UNHEALTHY = "is not healthy"
# Why a model fails to load as often as it is tried, until someone mends it.
_HOPELESS = re.compile(r"(?:ModuleNotFound|Import|FileNotFound|Syntax)Error\b")
# What explains no end: information, warnings, tables, the frames of a stack, and that there is no
# GPU.
_ORDINARY = re.compile(r"[IW]\d{4} |[+|]|\s*\d+# |Error: Failed to initialize NVML")
_OF_TRITON = re.compile(r"[EF]\d{4} [\d:.]+ |error: creating server")

_TAIL = 5
_RECENT = 20


@dataclass(frozen=True)
class LoadProgress:
    """The state of a start: ``elapsed`` seconds, the models still loading, and the ready ones."""

    elapsed: float
    loading: tuple[str, ...]
    ready: tuple[str, ...]

    def __str__(self) -> str:
        """Return the current activity for a progress display.

        >>> print(LoadProgress(2.0, loading=("gpt2",), ready=()))
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
        self.hopeless: set[str] = set()
        """Failed models that would fail again, whenever they are loaded."""
        self.unhealthy: set[str] = set()
        """Failed models whose process did not respond to Triton."""
        self.raised: dict[str, str] = {}
        """Models that could not be loaded, and why, also if Triton still waits for their processes
        to end before it reports that."""
        self.stuck: str | None = None
        """Why the server will neither become ready nor end."""
        self.stuck_model: str | None = None
        """The model that keeps it from that, if it is known."""
        self.notes: list[str] = []
        """Messages to the operator that models have logged while loading."""
        self._loads_before: Counter[str] = Counter()
        self._recent: deque[tuple[float, str]] = deque(maxlen=_RECENT)
        self._fatal: str | None = None
        self._problem: str | None = None

    def read(self) -> None:
        """Read the lines written since the last call."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    # Someone has emptied it, to keep it small.
                    self._offset, self._partial_line = 0, b""
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            # Someone has removed it: nothing more is known until the next start.
            return
        self._offset += len(new)
        *lines, self._partial_line = (self._partial_line + new).split(b"\n")
        for line in lines:
            self._parse(line.decode(errors="replace").rstrip())

    def forget(self, name: str) -> None:
        """Begin anew with a model that Triton is asked to load: earlier lines no longer count."""
        self.failures.pop(name, None)
        self.unhealthy.discard(name)
        self.raised.pop(name, None)
        self._loads_before[name] = self.loads[name]
        if "loading" not in self._models.values():
            # What it seemed to wait for has come to an end since.
            self.stuck = self.stuck_model = None

    def loads_since(self, name: str) -> int:
        """Return how often a model was loaded since it was forgotten."""
        return self.loads[name] - self._loads_before[name]

    def progress(self, elapsed: float) -> LoadProgress:
        loading = tuple(name for name, state in self._models.items() if state == "loading")
        ready = tuple(name for name, state in self._models.items() if state == "ready")
        return LoadProgress(elapsed, loading, ready)

    def why_it_ended(self) -> str | None:
        """Return the best explanation: the last error, Triton's own summary, or the last line."""
        return self._problem or self._fatal or (self.tail[-1] if self.tail else None)

    def last_words(self, since: float) -> str:
        """Return the last line that may explain an end and that was read ``since`` then, or ""."""
        return next((line for when, line in reversed(self._recent) if when >= since), "")

    def printed(self, since: float) -> str:
        """Return the last of these lines that a model's process has printed, or "".

        Triton's own lines say that it has failed, which is known.
        """
        lines = (line for when, line in reversed(self._recent) if when >= since)
        return next((line for line in lines if not _OF_TRITON.match(line)), "")

    def _parse(self, line: str) -> None:
        if line:
            self.tail.append(line)
            if not _ORDINARY.match(line):
                self._recent.append((time.monotonic(), line.strip()))
        if event := _EVENT.search(line):
            state, name = next(
                (kind, event[kind]) for kind in ("loading", "ready", "failed") if event[kind]
            )
            self._models[name] = state
            self.loads[name] += state == "ready"
            if state == "failed":
                self.failures[name] = why = in_plain_words(event["reason"])
                if _HOPELESS.match(why):
                    self.hopeless.add(name)
                else:
                    self.hopeless.discard(name)
                if _UNHEALTHY in event["reason"]:
                    self.unhealthy.add(name)
        elif note := _NOTE.search(line):
            self.notes.append(note["note"])
        elif stuck := _STUCK.search(line):
            self.stuck = in_plain_words(stuck["reason"])
            self.stuck_model = _model_in(line)
        elif (raised := _RAISED.search(line)) and (model := _model_in(line)):
            self.raised[model] = in_plain_words(raised["reason"])
        elif lost := _PORT_LOST.search(line):
            self.port_lost = lost["port"].lower()
        elif fatal := _FATAL.search(line):
            self._fatal = in_plain_words(fatal["reason"])
        elif (problem := _PROBLEM.match(line)) and "CudaDriverHelper" not in line:
            self._problem = in_plain_words(problem["reason"])


def _model_in(line: str) -> str | None:
    """Return the model whose file is named in a line."""
    match = _MODEL_FILE.match(line)
    return match and match["model"]


def in_plain_words(reason: str) -> str:
    r"""Return a reason from Triton's log without escapes, traceback and error category.

    >>> in_plain_words(r"Internal: ModuleNotFoundError: No module named 'acme'\n\nAt:\n  m.py(1)")
    "ModuleNotFoundError: No module named 'acme'"
    >>> in_plain_words("group m_0 specifies invalid or unsupported gpu id 0. GPUs of 6.0 are:: ")
    'this Triton sees no GPU 0 (nvidia-smi shows those there are; build with --device cpu for none)'
    """
    message = reason.replace("\\n", "\n").split("\n\nAt:\n")[0]
    if "shared memory key" in message:
        return "too little space in /dev/shm"
    if no_gpu := _NO_GPU.search(message):
        gpus = "nvidia-smi shows those there are; build with --device cpu for none"
        return f"this Triton sees no GPU {no_gpu['number']} ({gpus})"
    message = message.replace(f"{_UNHEALTHY}.", "did not respond for a second, or ended")
    message = _UNREADABLE.sub("this Triton cannot read its config.pbtxt", message)
    return " ".join(_CATEGORY.sub("", message).split()).rstrip(" ;")
