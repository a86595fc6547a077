"""Another user of the machine, who attacks a Triton with everything that its command line tells."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tests.wire import (
    ADDED,
    NEVER,
    Http2,
    Reply,
    coded,
    header,
    message,
    newest,
    over_grpc,
    over_http,
)

T = TypeVar("T")
USER = 1001
CODE = {"parameters": {"config": "{}", "file:1/model.py": "cHJpbnQoMSk="}}
PREFIX = b"triton-grpc-protocol-"
OVER_GRPC = {
    "SystemSharedMemoryStatus": b"",
    "SystemSharedMemoryRegister": message({1: b"planted", 2: b"/planted"}),
    "SystemSharedMemoryUnregister": b"",
    "CudaSharedMemoryStatus": b"",
    "CudaSharedMemoryRegister": message({1: b"planted", 2: bytes(64)}),
    "CudaSharedMemoryUnregister": b"",
    "TraceSetting": b"",
    "LogSettings": b"",
    "RepositoryModelLoad": message({2: b"planted"}),
    "RepositoryModelUnload": message({2: b"echo"}),
}
"""The methods with which a server is changed, each with a message."""
REGION = json.dumps({"key": "/planted", "offset": 0, "byte_size": 8}).encode()
OVER_HTTP = {
    "systemsharedmemory/status": b"",
    "systemsharedmemory/region/planted/register": REGION,
    "systemsharedmemory/unregister": b"{}",
    "cudasharedmemory/status": b"",
    "cudasharedmemory/region/planted/register": b"{}",
    "cudasharedmemory/unregister": b"{}",
    "trace/setting": b"",
    "models/echo/trace/setting": b'{"trace_rate": "1"}',
    "logging": b'{"log_verbose_level": 1}',
    "repository/models/planted/load": json.dumps(CODE).encode(),
    "repository/models/echo/unload": b"{}",
}


def as_another_user(work: Callable[[], T]) -> T:
    """Do something in a process of another user, if this one may start such a process."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # The new process only speaks through sockets of its own, so no lock that is held matters.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(USER)
                os.setuid(USER)
            os.write(writing, pickle.dumps(work()))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        result = answer.read()
    os.waitpid(child, 0)
    value: T = pickle.loads(result)
    return value


def secrets_of(process: int, option: str) -> list[tuple[bytes, bytes]]:
    """Read the headers that open a server's interfaces from its command line."""
    words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    restrictions = [word for word in words if word.startswith(f"--{option}=".encode())]
    pairs = [word.partition(b":")[2].partition(b"=") for word in restrictions]
    return [(name, value) for name, _, value in pairs]


def spellings(name: bytes, value: bytes) -> Iterator[dict[str, object]]:
    """Return the ways to send a header over HTTP/2, as arguments of a call."""
    for kind in (0, ADDED, NEVER):
        yield {"fields": [header(name, value, kind)]}
    yield {"fields": [header(name, value, ADDED), newest()]}
    yield {"fields": [header(name, value, ADDED), newest(value)]}
    yield {"fields": [coded(name, value)]}
    yield {"fields": [header(name, value)] * 2}
    yield {"fields": [header(name, value)], "pieces": 7}
    yield {"before": [header(name, value)]}
    # Names that a parser might take for this one.
    head, _, tail = name.partition(b":")
    for other in (
        head, b":" + name, name + b"\0", name + b" ", name.upper(), head + b"\0:" + tail,
        name.replace(b":", b"\r\n:"), name.replace(b":", b"%3a"), name + b"-bin",
    ):  # fmt: skip
        yield {"fields": [header(other, value)]}
        yield {"fields": [header(other, tail + b"=" + value)]}


def lines(name: bytes, value: bytes) -> Iterator[bytes]:
    """Return the ways to send a header over HTTP/1.1, as bytes among a request's headers."""
    line = name + b": " + value
    head, _, tail = name.partition(b":")
    yield from (line + end for end in (b"\r\n", b" \r\n", b"\r\n\r\n", b"\n", b"\0\r\n"))
    for other in (
        line.upper(), b":" + line, b" " + line, b"\t" + line, b"\0" + line, b"\r\n" + line,
        name + b":" + value, name + b" : " + value, head + b"\0:" + tail + b": " + value,
        head + b"\r\n\t:" + tail + b": " + value, head + b"\r:" + tail + b": " + value,
        head + b": x\r\n:" + tail + b": " + value, head + b"\n:" + tail + b": " + value,
        b"x: y\r\n\t" + line, b"x: y\r" + line, b"x: y\n" + line, b"x: y\0" + line,
        b'"' + name + b'": ' + value, name.replace(b":", b"%3a") + b": " + value,
        b"a" * 8185 + line, b"a: " + b"b" * 8185 + line,
    ):  # fmt: skip
        yield other + b"\r\n"


def open_over_grpc(process: int, port: int) -> list[str]:
    """Return what the headers on a server's command line open over gRPC."""
    opened = []
    for name, value in secrets_of(process, "grpc-restricted-protocol"):
        for method, body in OVER_GRPC.items():
            for spelling in [{}, *spellings(PREFIX + name, value)]:
                with over_grpc(port) as connection:
                    if call(connection, method, body, spelling).accepted:
                        opened.append(f"{method} {spelling}")
        # One connection has one table, which outlives a request that was refused.
        with over_grpc(port) as connection:
            for fields in ([header(PREFIX + name, value, ADDED)], [newest()], [newest(value)]):
                if connection.call("SystemSharedMemoryStatus", fields=fields).accepted:
                    opened.append(f"SystemSharedMemoryStatus on one connection {fields}")
    return opened


def call(connection: Http2, method: str, body: bytes, spelling: dict[str, object]) -> Reply:
    return connection.call(method, body, **spelling)  # type: ignore[arg-type]


def open_over_http(process: int, port: int) -> list[str]:
    """Return what the headers on a server's command line open over HTTP."""
    opened = []
    for name, value in secrets_of(process, "http-restricted-api"):
        for path, body in OVER_HTTP.items():
            for spelling in [b"", *lines(name, value)]:
                if over_http(port, f"v2/{path}", spelling, body=body).startswith(b"HTTP/1.1 2"):
                    opened.append(f"{path} {spelling!r}")
        # The headers after a body in chunks are added to those before it.
        for spelling in lines(name, value):
            chunked = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + spelling
            if over_http(port, "v2/logging", chunked).startswith(b"HTTP/1.1 2"):
                opened.append(f"logging, after a body {spelling!r}")
    return opened
