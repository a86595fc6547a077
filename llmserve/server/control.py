"""A socket at which ``serve`` tells how its models are, and is asked to load one anew.

It lies in a folder that only its user can look into, so whoever can connect is that user.
A request is a line of JSON, and so is the answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from llmserve.errors import LLMServeError, ServerError

Answer = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]

_LONGEST = 65536
_QUICK = 5.0


def control_folder() -> Path:
    """Return the folder of the sockets, which nobody else may list or write to."""
    home = os.environ.get("XDG_RUNTIME_DIR")
    if home and os.access(home, os.W_OK):
        folder = Path(home, "llmserve")
    else:
        folder = Path(tempfile.gettempdir(), f"llmserve-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ServerError(
            f"{folder} can be read or written by others", mend=f"chmod 700 {folder}, or remove it"
        )
    return folder


def control_socket(url: str) -> Path:
    """Return the socket of the ``serve`` whose Triton has this gRPC address."""
    return control_folder() / f"{url}.sock"


@asynccontextmanager
async def listening(path: Path, answer: Answer) -> Any:
    """Answer at a socket while the block runs."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told: Mapping[str, Any]
        try:
            told = await answer(json.loads(await reader.readline()))
        except (LLMServeError, OSError) as error:
            told = {"error": str(error)}
        except (ValueError, TypeError):
            told = {"error": "a request is a line of JSON"}
        with suppress(OSError):
            writer.write(json.dumps(told).encode() + b"\n")
            await writer.drain()
        writer.close()

    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(serve, path, limit=_LONGEST)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


def ask(path: Path, request: Mapping[str, Any], timeout: float | None = _QUICK) -> dict[str, Any]:
    """Ask a ``serve`` at its socket; raise where it refuses, or where nobody is there."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = b"".join(iter(lambda: connection.recv(_LONGEST), b""))
            told: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            raise ServerError(f"no `llmserve serve` answers at {path} ({error})") from None
    if "error" in told:
        raise ServerError(told["error"])
    return told


def everybody() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Go through every ``serve`` of this user that answers, with what it tells of itself."""
    for path in sorted(control_folder().glob("*.sock")):
        with suppress(ServerError):
            yield path, ask(path, {"do": "status"})
