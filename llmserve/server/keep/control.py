"""The control socket, on which ``serve`` reports on its models, and loads and unloads them.

Each ``serve`` has one from its start to its end, so that other commands find it. It is in a folder
that only its user can access, so every client is that user. A request is a line of JSON, and so is
the response; some requests have several, until the client closes the connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

from llmserve.contract.report import ServerReport, State
from llmserve.errors import LLMServeError, ServerError

Handler = Callable[[Mapping[str, Any]], Awaitable[ServerReport]]
"""Carries out a request, and returns what there is to report then."""
Follower = Callable[[Mapping[str, Any]], AsyncGenerator[Mapping[str, Any], None]]
"""Answers a request with several lines; it is closed when the client has gone."""

_MAX_LINE = 65536
_TIMEOUT = 5.0


def _candidates() -> list[Path]:
    """Return where the sockets may be, the best place first.

    Two shells of a user may have different environments: a ``serve`` that a service manager has
    started may have no ``XDG_RUNTIME_DIR``, and only one of them a ``TMPDIR``.
    """
    user = os.getuid()
    usual = f"/run/user/{user}"
    home = os.environ.get("XDG_RUNTIME_DIR") or usual
    folders = [Path(home, "llmserve")] if os.access(home, os.W_OK) else []
    if not folders or home == usual:
        folders += [Path(tempfile.gettempdir(), f"llmserve-{user}"), Path(f"/tmp/llmserve-{user}")]
    return list(dict.fromkeys(folders))


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    ours = status.st_uid == os.getuid() and not status.st_mode & 0o077
    return ours and folder.is_dir() and not folder.is_symlink()


def control_folder() -> Path:
    """Return the folder of the sockets, which no other user may list or write to."""
    folder = _candidates()[0]
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _refuse_shared(folder)
    return folder


def _refuse_shared(folder: Path) -> None:
    if not _is_private(folder):
        raise ServerError(
            f"{folder} is accessible to other users", hint=f"chmod 700 {folder}, or remove it"
        )


async def _follow(
    answers: AsyncGenerator[Mapping[str, Any], None],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Send answers until they end, or the client has gone."""
    gone = asyncio.ensure_future(reader.read())
    pending: list[asyncio.Future[Any]] = [gone]
    try:
        while True:
            answer = asyncio.ensure_future(anext(answers, None))
            pending = [gone, answer]
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() or (line := answer.result()) is None:
                return
            writer.write(json.dumps(line).encode() + b"\n")
            await writer.drain()
    except OSError:
        return
    finally:
        for each in pending:
            each.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await answers.aclose()
        writer.close()


_NO_FOLLOWERS: Mapping[str, Follower] = MappingProxyType({})


@asynccontextmanager
async def listening(
    path: Path, answer: Handler, followers: Mapping[str, Follower] = _NO_FOLLOWERS
) -> AsyncIterator[None]:
    """Answer requests on a socket while the block runs; who listened there before is replaced.

    ``followers`` answer requests to ``do`` what they are called.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        response: Mapping[str, Any]
        try:
            request = json.loads(await reader.readline())
            if follower := followers.get(request.get("do")):
                # At the end of the loop, which asyncio (3.11) would report as an error.
                with suppress(asyncio.CancelledError):
                    await _follow(follower(request), reader, writer)
                return
            response = (await answer(request)).to_json()
        except (LLMServeError, OSError) as error:
            response = {"error": str(error)}
        except (ValueError, TypeError, AttributeError):
            response = {"error": "the request is not a line of JSON"}
        with suppress(OSError):
            writer.write(json.dumps(response).encode() + b"\n")
            await writer.drain()
        writer.close()

    # Under another name until it listens, so that a socket that refuses a connection is a dead one.
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(serve, draft, limit=_MAX_LINE)
    try:
        draft.replace(path)
    except OSError:
        server.close()
        raise
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


@contextmanager
def announced(answer: Handler) -> Iterator[Path]:
    """Answer requests on this process's control socket from a thread, and return its path.

    A supervisor that listens at the same path takes over.
    """
    path = control_folder() / f"{os.getpid()}-{secrets.token_hex(4)}.sock"
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        ended = asyncio.Event()
        async with listening(path, answer):
            started.set_result((asyncio.get_running_loop(), ended))
            await ended.wait()

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            if started.done():
                raise
            # Whatever it is: the caller waits for it.
            started.set_exception(error)

    thread = Thread(target=work, name="control", daemon=True)
    thread.start()
    loop, ended = started.result()
    try:
        yield path
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


def ask(path: Path, request: Mapping[str, Any], timeout: float | None = _TIMEOUT) -> ServerReport:
    """Send a request to a ``serve`` process; raise if it refuses or does not answer."""
    try:
        response = _exchange(path, request, timeout)
        if "error" not in response:
            return ServerReport.from_json(response)
    except (OSError, ValueError) as error:
        raise ServerError(f"no `llmserve serve` answers at {path} ({error})") from None
    raise ServerError(response["error"])


def _exchange(path: Path, request: Mapping[str, Any], timeout: float | None) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        connection.sendall(json.dumps(request).encode() + b"\n")
        line = b"".join(iter(lambda: connection.recv(_MAX_LINE), b""))
    response: dict[str, Any] = json.loads(line)
    return response


def running_servers() -> Iterator[tuple[Path, ServerReport]]:
    """Yield the socket and the report of every ``serve`` process of this user.

    The sockets of processes that were killed are removed. Of one that does not answer, because it
    was stopped, only its number is known.
    """
    if (first := _candidates()[0]).exists():
        _refuse_shared(first)
    folders = [folder for folder in _candidates() if _is_private(folder)]
    for path in sorted(path for folder in folders for path in folder.glob("*.sock")):
        try:
            status = ServerReport.from_json(_exchange(path, {"do": "status"}, _TIMEOUT))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except TimeoutError:
            yield path, ServerReport(State.SILENT, pid=int(path.name.partition("-")[0]))
        except (OSError, ValueError):
            continue
        else:
            yield path, status
