"""A gateway in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NO_TRITON = "127.0.0.1:9"
_RUN = """
import sys
{before}
from llmserve_gateway.admission import Limits
from llmserve_gateway.gateway import Settings
from llmserve_gateway.serving import Listening, run
run(Settings({url!r}, Limits({limits})), Listening(port=0, {fields}),
    lambda address: print(address, file=sys.stderr, flush=True))
"""


@contextmanager
def gateway_command(*args: str) -> Iterator[int]:
    """Run `llmserve gateway` without a Triton, and yield its port."""
    command = ["-m", "llmserve_cli", "gateway", "--port", "0", "--url", NO_TRITON, *args]
    with _port_of(command) as (_, port):
        yield port


@contextmanager
def gateway_process(
    fields: str = "", limits: str = "1, 1", url: str = NO_TRITON, before: str = ""
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a gateway with fields of `Listening`, and yield its process and its port."""
    command = ["-c", _RUN.format(url=url, limits=limits, fields=fields, before=before)]
    with _port_of(command) as running:
        yield running


@contextmanager
def _port_of(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *command], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    try:
        assert process.stderr is not None
        address = process.stderr.readline()
        yield process, int(address.rpartition(":")[2].removesuffix("/v1\n"))
    finally:
        process.kill()
        process.wait()
