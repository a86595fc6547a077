"""The control socket, on which ``serve`` reports the state of its models and reloads them.

It is in a folder that only its user can access, so every client is that user. A request is a line
of JSON, and so is the response.
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

Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]

_MAX_LINE = 65536
_TIMEOUT = 5.0


def control_folder() -> Path:
    """Return the folder of the sockets, which no other user may list or write to."""
    home = os.environ.get("XDG_RUNTIME_DIR")
    if home and os.access(home, os.W_OK):
        folder = Path(home, "llmserve")
    else:
        folder = Path(tempfile.gettempdir(), f"llmserve-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ServerError(
            f"{folder} is accessible to other users", mend=f"chmod 700 {folder}, or remove it"
        )
    return folder


def control_socket(url: str) -> Path:
    """Return the socket of the ``serve`` process whose Triton has this gRPC address."""
    return control_folder() / f"{url}.sock"


@asynccontextmanager
async def listening(path: Path, answer: Handler) -> Any:
    """Answer requests on a socket while the block runs."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        response: Mapping[str, Any]
        try:
            response = await answer(json.loads(await reader.readline()))
        except (LLMServeError, OSError) as error:
            response = {"error": str(error)}
        except (ValueError, TypeError):
            response = {"error": "the request is not a line of JSON"}
        with suppress(OSError):
            writer.write(json.dumps(response).encode() + b"\n")
            await writer.drain()
        writer.close()

    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(serve, path, limit=_MAX_LINE)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


def ask(path: Path, request: Mapping[str, Any], timeout: float | None = _TIMEOUT) -> dict[str, Any]:
    """Send a request to a ``serve`` process; raise if it refuses or does not answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = b"".join(iter(lambda: connection.recv(_MAX_LINE), b""))
            response: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            raise ServerError(f"no `llmserve serve` answers at {path} ({error})") from None
    if "error" in response:
        raise ServerError(response["error"])
    return response


def running_servers() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the socket and the status of every ``serve`` process of this user that answers."""
    for path in sorted(control_folder().glob("*.sock")):
        with suppress(ServerError):
            yield path, ask(path, {"do": "status"})
