"""What servers do here because of someone else's fault.

Each row says what is wrong, where it was seen, which code makes up for it, and how one would notice
that the row and its code can go. What fits is below the rows; the guard, which runs isolated, and
what is one line of something else has only its row here. The client has a module of the same name.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from llmserve.contract.names import RENEWED
from llmserve.contract.workaround import Workaround
from llmserve.server.find.launch import FAR_FUTURE, POLL

_EMBEDDED = "Triton 2.51 (24.10, in nvidia-pytriton 0.7)"


DIED_LOADING = Workaround(
    "A model's process that dies while it loads is waited for forever, and nothing else loads.",
    _EMBEDDED,
    (
        "workarounds:DEATH_REPORTED",
        "run.readiness:Readiness._died_while_loading",
        "keep.deaths:_died_loading",
        "keep.deaths:_end_load",
    ),
    "kill -9 of a process that loads is reported in the log as `failed to load` within a second",
)
GIVEN_UP = Workaround(
    "A process that hangs for a second while it loads, as with the whole machine, is given up as "
    "unhealthy; before that is reported, its end is waited for, which never comes.",
    _EMBEDDED,
    ("workarounds:waited_for", "run.stubs:Stubs.given_up", "keep.deaths:_notice_models"),
    "test_a_model_that_stops_while_it_loads_does_not_block_anything passes without it",
)
FILES_GONE = Workaround(
    "A process whose files go before it has read them is waited for forever.",
    _EMBEDDED,
    (
        "workarounds:withdraw_model",
        "keep.load_and_unload:_follow_unload",
        "run.guard:_end_loading",
    ),
    "unloading a model at once after `loading:` in the log, twenty times, leaves no Triton stuck",
)
STUCK_STUB = Workaround(
    "After `Failed to preinitialize Python stub` the stub that has ended is waited for forever.",
    _EMBEDDED,
    (
        "run.log:ServerLog",
        "keep.deaths:_check_loading",
        "keep.load_and_unload:_follow_load",
        "keep.load_and_unload:_check_whether_gone",
    ),
    "a stub that cannot start (no libpython) is reported as `failed to load`",
)
TRIED_AGAIN = Workaround(
    "With polling, a model that failed to load is tried again at every check, and one is loaded "
    "again whenever another cannot be read.",
    _EMBEDDED,
    ("workarounds:keep_model", "workarounds:withdraw_model", "keep.act:Actor._stop_trying"),
    "a model that raises in `initialize` is loaded once, by the log",
)
UNREADABLE = Workaround(
    "With polling, nothing is reported of a configuration that cannot be read.",
    _EMBEDDED,
    ("keep.reconciler:Reconciler._check", "keep.load_and_unload:_check_whether_gone"),
    "the repository index has the reason for such a model",
)
CRASHED = Workaround(
    "A model whose process has crashed is reported as ready, and the process stays a zombie.",
    _EMBEDDED,
    ("run.stubs:Stubs.poll", "keep.observe:TritonObserver._look_at_processes"),
    "/v2/models/NAME/ready is 400 a second after kill -9 of the process",
)
SIGTERM_LOADING = Workaround(
    "SIGTERM during the first load kills the server at once, and /tmp/python_env_... remains.",
    _EMBEDDED,
    ("run.guard:_end_loading",),
    "SigCgt in /proc/PID/status has SIGTERM from the start",
)
PUBLIC_MEMORY = Workaround(
    "The library for shared memory sets mode 0644 whatever the umask is: all users read prompts.",
    f"{_EMBEDDED}, with Boost.Interprocess",
    ("run.guard:_program",),
    "test_server_private passes with the filter left out",
)
UNQUOTED = Workaround(
    "The path of a model is passed to a shell without quotes, and Python in the stub opens only "
    "paths in ASCII.",
    _EMBEDDED,
    ("find.launch:link_models", "run.process:scratch_folder"),
    "a repository below a folder named `a b` is served without the links",
)
NO_SHELL = Workaround(
    "A model's process is started through bash, and waited for forever if there is none on PATH.",
    _EMBEDDED,
    ("find.embedded:environment",),
    "with an empty PATH, a model is reported as `failed to load`",
)
ISOLATED_PYTHON = Workaround(
    "The interpreter of the stub ignores PYTHONPATH and the locale, from Python 3.11 on.",
    _EMBEDDED,
    ("find.stub_site:write",),
    "the stub imports a package that only PYTHONPATH has",
)
ENCODED_HEADERS = Workaround(
    "Trace headers are sent as they are, while OpenTelemetry has them percent-encoded.",
    _EMBEDDED,
    ("find.launch:environment_of_triton",),
    "a collector gets `a b` for OTEL_EXPORTER_OTLP_HEADERS=x=a%20b",
)
COUNTED_FOREVER = Workaround(
    "A request that is cancelled in a queue may count as running forever, which delays the exit.",
    _EMBEDDED,
    ("server:Server._has_no_clients",),
    "test_server_endings passes with `idle` left out",
)
UNLOADED_AT_WORK = Workaround(
    "It can crash when it unloads a model while one of its threads ends the last request.",
    _EMBEDDED,
    ("keep.demand:Demand", "keep.load_and_unload:_is_idle"),
    "200 reloads of a model with four clients leave Triton alive",
)
NEVER_ENDED = Workaround(
    "A request whose client left at the last moment stays forever, and with it the processes of "
    "its model, after that is unloaded.",
    _EMBEDDED,
    ("keep.load_and_unload:_check_whether_ended",),
    "clients that disconnect at random, and then an unload, leave no process of the model",
)
FORGOTTEN_EARLY = Workaround(
    "The index forgets a model as soon as its folder is gone, while it still serves.",
    _EMBEDDED,
    ("server:Server.takes_requests",),
    "the index has a dropped model as READY or UNLOADING until it is unloaded",
)


DEATH_REPORTED = 3.0
"""Seconds for Triton to report the death of a process that was loading a model; it may never."""

_WAIT4 = ("61", "260")
"""The system call that waits for a process to end, on x86-64 and on ARM."""


def waited_for(waiting: int) -> set[int]:
    """Return the processes whose end a thread of the process ``waiting`` waits for."""
    processes = set()
    # Errors: it has ended.
    with suppress(OSError):
        for thread in Path(f"/proc/{waiting}/task").iterdir():
            # Errors: the thread has ended, or is in no system call: that is a single word.
            with suppress(OSError, ValueError):
                call, first, *_ = (thread / "syscall").read_text(encoding="ascii").split()
                if call in _WAIT4:
                    processes.add(int(first, 16))
    return processes


def keep_model(links: Path) -> None:
    """Make Triton keep the model that it has, after it has failed to reload a changed one.

    It compares the times with those of the one that it has, and would try again at every check.
    """
    for mark in links.glob(f"*/{RENEWED}"):
        previous = int(mark.stat().st_mtime) - 1
        if previous >= FAR_FUTURE:
            os.utime(mark, (previous, previous))


_WITHDRAWN = "{ withdrawn, since it failed to load"
_WITHDRAWAL = 3.0 * POLL
"""Seconds after which Triton has noticed an unreadable configuration."""


def withdraw_model(links: Path) -> None:
    """Take a new model away from Triton, which would try again at every check to load it.

    It gets a configuration that it cannot read first; then nothing begins any more, and its files
    may go.
    """
    config, new = links / "config.pbtxt", links / ".config.pbtxt"
    new.write_text(_WITHDRAWN, encoding="utf-8")
    new.replace(config)
    time.sleep(_WITHDRAWAL)
    if config.read_text(encoding="utf-8") == _WITHDRAWN:
        removed = links.parent.with_name(f"withdrawn-{links.name}")
        links.rename(removed)
        shutil.rmtree(removed)
