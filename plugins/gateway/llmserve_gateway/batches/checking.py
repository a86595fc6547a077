"""Checks a file of requests in a process of its own, which nothing else has to wait for.

To read many large lines takes seconds, in which a thread would hold up all requests. The module is
also the program of that process: it prints a list for each request, or an object that says what is
wrong, and its last line is ``null``. It has limits, a low priority, and ends with its gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

from llmserve.client import BatchFileError, BatchRequest, BatchRequests

_CPU_SECONDS = 120
"""200 MB of requests take three of a processor, with as many parts as they may have."""
_MEMORY = 2 << 30
_NICE = 10


async def checked(path: Path, limits: Mapping[str, Any]) -> BatchRequests:
    """Return the requests of a file, or raise :class:`BatchFileError`."""
    command = [sys.executable, "-m", __name__, str(path), json.dumps(limits)]
    process = await asyncio.to_thread(
        subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    reading = asyncio.ensure_future(asyncio.to_thread(_read, process, path))
    try:
        known = await asyncio.shield(reading)
    except asyncio.CancelledError:
        process.kill()
        with suppress(Exception):
            await reading
        raise
    return BatchRequests(path, **limits, known=known)


def _read(process: subprocess.Popen[bytes], path: Path) -> list[BatchRequest]:
    """Return what the process has found; it has ended then."""
    assert process.stdout is not None  # noqa: S101
    requests: list[BatchRequest] = []
    names: dict[str, str] = {}
    with process:
        for line in process.stdout:
            match json.loads(line):
                case [number, custom_id, model, endpoint, offset, size]:
                    # Those that many lines have are in memory once.
                    model, endpoint = (names.setdefault(name, name) for name in (model, endpoint))
                    found = BatchRequest(number, custom_id, model, endpoint, offset, size)
                    requests.append(found)
                case {"what": what, "hint": hint, "line": number}:
                    raise BatchFileError(path, what, hint=hint, line=number)
                case _:
                    return requests
    raise BatchFileError(path, "takes too long to check, or too much memory", hint="divide it")


def main() -> None:
    """Check the file that the command line names."""
    threading.Thread(target=_end_with_gateway, daemon=True).start()
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path, limits = Path(sys.argv[1]), json.loads(sys.argv[2])
    try:
        with closing(BatchRequests(path, **limits)) as requests:
            for request in requests.all:
                _print(astuple(request))
        _print(None)
    except BatchFileError as error:
        _print({"what": error.what, "hint": error.hint, "line": error.line})
    sys.stdout.flush()
    # The thread still reads.
    os._exit(0)


def _print(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def _end_with_gateway() -> None:
    """Wait for the end of the standard input, which the gateway keeps open."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
