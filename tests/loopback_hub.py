"""A hub on this machine: models with their files, and everything that may go wrong with one."""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import pytest

from llmserve.demo import demo_model_path
from llmserve.testing.web import http_server, reply

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "acme/tiny"
_LARGE = 100_000
"""From this size on, a file is listed as the hub lists those that it keeps apart from git."""
_BLOCK = 1 << 14


@dataclass(frozen=True)
class Asked:
    """A request that came."""

    method: str
    path: str
    headers: Mapping[str, str]


Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Hub:
    """A hub with one model, which a test may change.

    ``cuts`` are, for each file, after how many bytes of an answer its connection is cut, one for
    each request; ``refusals`` are answered instead of the next requests for files, and ``busy``
    instead of the next requests for the list of them. ``seconds_per_block`` makes it slow.
    """

    files: dict[str, bytes]
    commit: str = COMMIT
    listed: dict[str, int] = field(default_factory=dict)
    """Sizes that are listed instead of the true ones."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    refusals: list[tuple[int, Mapping[str, str]]] = field(default_factory=list)
    busy: list[tuple[int, Mapping[str, str]]] = field(default_factory=list)
    seconds_per_block: float = 0.0
    silent: set[str] = field(default_factory=set)
    """Files of which nothing is sent while they are here."""
    is_plain: bool = False
    """Whether it lists names alone, as some mirrors do."""
    knows_sizes: bool = True
    """Whether it says how large a file is before that is sent."""
    ignores_ranges: bool = False
    elsewhere: str = ""
    """The address from which files are had."""
    private: str = ""
    """The token without which it has no such model."""
    asked: list[Asked] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    """The bytes of each file that were sent."""
    answering: list[BaseHTTPRequestHandler] = field(default_factory=list, repr=False)
    before_file: Callable[[str], None] = lambda _: None

    @contextmanager
    def serving(self) -> Iterator[str]:
        with http_server(self.answer) as url:
            yield url

    @property
    def downloaded(self) -> list[str]:
        """The files that were asked for, in that order."""
        found = (request.path.rpartition(f"/resolve/{self.commit}/")[2] for request in self.gets())
        return [name for name in found if name in self.files]

    def gets(self) -> list[Asked]:
        return [request for request in self.asked if request.method == "GET"]

    def sent_bytes(self) -> Mapping[str, int]:
        """Return the bytes of each file that were sent, when nothing is being sent."""
        while self.answering:
            time.sleep(0.01)
        return dict(self.sent)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.answering.append(request)
        try:
            self._answer(request)
        finally:
            self.answering.remove(request)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path, _, query = request.path.removeprefix("/mirror").partition("?")
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append(Asked(request.command, path, headers))
        if self.private and headers.get("authorization") != f"Bearer {self.private}":
            reply(request, status=401, headers={"X-Error-Code": "RepoNotFound"})
        elif "/resolve/" in path:
            self._send(request, unquote(path.rpartition("/resolve/")[2].partition("/")[2]))
        elif self.busy:
            status, described = self.busy.pop(0)
            reply(request, status=status, headers=described)
        elif path == f"/api/models/{MODEL}" or path.startswith(f"/api/models/{MODEL}/revision/"):
            siblings = [self._listed(name, described="blobs" in query) for name in self.files]
            info = {"id": MODEL, "sha": self.commit, "siblings": siblings}
            reply(request, json.dumps(info).encode())
        elif path == f"/api/models/{MODEL}/tree/{self.commit}":
            # Libraries ask for it when they load a model that was downloaded.
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": _of_git(content)}
                for name, content in self.files.items()
            ]
            reply(request, json.dumps(tree).encode())
        else:
            code = "EntryNotFound" if path.startswith(f"/api/models/{MODEL}/") else "RepoNotFound"
            reply(request, status=404, headers={"X-Error-Code": code})

    def _listed(self, name: str, *, described: bool) -> Mapping[str, object]:
        if self.is_plain or not described:
            return {"rfilename": name}
        content = self.files[name]
        size = self.listed.get(name, len(content))
        found: dict[str, object] = {"rfilename": name, "size": size, "blobId": _of_git(content)}
        if len(content) >= _LARGE:
            sha256 = hashlib.sha256(content).hexdigest()
            found["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 134}
        return found

    def _send(self, request: BaseHTTPRequestHandler, name: str) -> None:
        self.before_file(name)
        if name not in self.files:
            reply(request, status=404, headers={"X-Error-Code": "EntryNotFound"})
            return
        content = self.files[name]
        large = len(content) >= _LARGE
        blob = hashlib.sha256(content).hexdigest() if large else _of_git(content)
        headers = {"ETag": f'"{blob}"', "X-Repo-Commit": self.commit, "Accept-Ranges": "bytes"}
        if request.command == "HEAD":
            if self.knows_sizes:
                headers["X-Linked-Size"] = str(len(content))
            reply(request, headers=headers)
        elif self.refusals:
            status, described = self.refusals.pop(0)
            reply(request, status=status, headers=described)
        elif self.elsewhere:
            location = f"{self.elsewhere}{request.path}"
            reply(request, status=302, headers={**headers, "Location": location})
        else:
            self._send_content(request, name, content, headers)

    def _send_content(
        self, request: BaseHTTPRequestHandler, name: str, content: bytes, headers: dict[str, str]
    ) -> None:
        begin, end = _range(request.headers.get("Range", ""), len(content))
        if self.ignores_ranges:
            begin, end = 0, len(content)
        if begin >= len(content) and content:
            reply(request, status=416)
            return
        request.send_response(206 if end - begin < len(content) else 200)
        if end - begin < len(content):
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        length = {"Content-Length": str(end - begin)} if self.knows_sizes else {}
        for key, value in {**headers, **length}.items():
            request.send_header(key, value)
        request.end_headers()
        cuts = self.cuts.get(name)
        stop = min(end, begin + cuts.pop(0)) if cuts else end
        while name in self.silent:
            time.sleep(0.05)
        for at in range(begin, stop, _BLOCK):
            block = content[at : min(at + _BLOCK, stop)]
            try:
                request.wfile.write(block)
            except OSError:
                break
            self.sent[name] += len(block)
            time.sleep(self.seconds_per_block)
        request.close_connection = stop < end or not self.knows_sizes


def _range(asked: str, size: int) -> tuple[int, int]:
    if not asked.startswith("bytes="):
        return 0, size
    begin, _, end = asked.removeprefix("bytes=").partition("-")
    return int(begin), min(size, int(end) + 1) if end else size


def _of_git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def demo_files() -> dict[str, bytes]:
    """Return the files of the demo model, which can be built and served."""
    return {path.name: path.read_bytes() for path in demo_model_path().iterdir() if path.is_file()}


@contextmanager
def proxy(hub: Hub, *, target: str = "") -> Iterator[tuple[str, list[str]]]:
    """Run a proxy to a hub; yield its address, and what it was asked for.

    It answers for every host with the hub, and connects to the address ``target`` if it is asked
    for a tunnel.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.path = "/" + self.path.split("/", 3)[3]
            hub.answer(self)

        do_HEAD = do_GET

        def do_CONNECT(self) -> None:
            asked.append(self.path)
            host, _, port = target.rpartition(":")
            with socket.create_connection((host, int(port))) as other:
                self.send_response(200)
                self.end_headers()
                back = Thread(target=_copy, args=(other, self.connection), daemon=True)
                back.start()
                _copy(self.connection, other)
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


@contextmanager
def tls_hub(hub: Hub, folder: Path) -> Iterator[tuple[str, Path]]:
    """Serve a hub with TLS; yield its host and port, and the certificate to be trusted."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", key,
         "-out", cert, "-subj", "/CN=hub.invalid", "-addext", "subjectAltName=DNS:hub.invalid"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with http_server(hub.answer, context) as url:
        yield url.removeprefix("http://"), cert


def point_to(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's client of this process ask this hub, and keep what it gets in this folder."""
    from huggingface_hub import constants

    path = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
