"""Opens the addresses of images that requests have, of the hosts that an operator names.

A host's name is resolved once, and the connection goes to the very address that was checked. What
the environment says of proxies is not read.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import httptools

from llmserve.runtime.contract import IMAGE_URL, ImageLimits, image_url
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.image_hosts import (
    ImageHost,
    is_address,
    is_public,
    read_address,
    read_hosts,
)
from llmserve_gateway.text_requests import FETCHED_BYTES

MAX_TOTAL_BYTES = 4 * FETCHED_BYTES
MAX_ADDRESSES = ImageLimits().images
SECONDS = 10.0
"""How long all images of a request may take."""
_AT_ONCE = 16
_HEAD_BYTES = 32 << 10
_PIECE = 64 << 10
_ADDRESSES = 2
"""How many addresses of a host are tried."""
_BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")


class ImageFetcher:
    """Puts images in the place of their addresses.

    ``may_open`` says of an IP address whether it may be opened; no setting changes it.
    """

    def __init__(
        self, hosts: Iterable[str], *, may_open: Callable[[str], bool] = is_public
    ) -> None:
        self._hosts = read_hosts(hosts)
        self._may_open = may_open
        self._places = asyncio.Semaphore(_AT_ONCE)

    def check(self, options: dict[str, Any]) -> None:
        """Refuse addresses that are not opened, before anything is done for a request."""
        self._targets(options.get(IMAGE_URL.name, ()))

    async def fetch(self, options: dict[str, Any]) -> None:
        """Replace the addresses in the options of a request."""
        images: Sequence[str] = options.get(IMAGE_URL.name, ())
        targets = self._targets(images)
        if not targets:
            return
        try:
            found = await asyncio.wait_for(self._fetched(targets), SECONDS)
        except asyncio.TimeoutError:
            what = f"images did not arrive within {SECONDS:g} s: send them in the request"
            raise _refused(what) from None
        options[IMAGE_URL.name] = [found.get(url, url) for url in images]

    def _targets(self, images: Sequence[str]) -> dict[str, tuple[int, ImageHost, str]]:
        """Return what to open for each address, with the image's number for what is said of it."""
        targets: dict[str, tuple[int, ImageHost, str]] = {}
        for number, url in enumerate(images, 1):
            if not is_address(url):
                continue
            if not self._hosts:
                what = (
                    f"image {number} is an image that is not in the request, and this server opens "
                    "no addresses (serve --allow-image-host): send it as data:image/png;base64,"
                )
                raise bad_request(what, "messages")
            read = read_address(url)
            if read is None or read[0] not in self._hosts:
                what = f"image {number} is at no host that this server opens: send it as data:"
                raise bad_request(f"{what}image/png;base64,", "messages")
            targets.setdefault(url, (number, *read))
        if len(targets) > MAX_ADDRESSES:
            what = f"{len(targets)} addresses of images are more than {MAX_ADDRESSES}: send fewer"
            raise bad_request(what, "messages")
        return targets

    async def _fetched(self, targets: dict[str, tuple[int, ImageHost, str]]) -> dict[str, str]:
        tasks = {
            url: asyncio.ensure_future(self._fetch_one(*target)) for url, target in targets.items()
        }
        try:
            contents = await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        if sum(map(len, contents)) > MAX_TOTAL_BYTES:
            what = f"the images are over {MAX_TOTAL_BYTES >> 20} MB together: send fewer"
            raise _refused(what)
        return {url: image_url(content) for url, content in zip(tasks, contents, strict=True)}

    async def _fetch_one(self, number: int, host: ImageHost, path: str) -> bytes:
        async with self._places:
            try:
                content = await self._get(host, path)
            except _NotFetchedError as error:
                raise _refused(f"image {number}: {host.name} {error}") from None
            except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade):
                what = "cannot be reached, or does not answer as it should"
                raise _refused(f"image {number}: {host.name} {what}") from None
        if not content.startswith(_BEGINNINGS):
            what = "does not send a PNG, JPEG, WebP or GIF there"
            raise _refused(f"image {number}: {host.name} {what}")
        return content

    async def _addresses(self, host: ImageHost) -> list[str]:
        """Return the IP addresses of a host; all of them have to be public."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)
        addresses = [*dict.fromkeys(str(each[4][0]) for each in found)]
        if not addresses or not all(map(self._may_open, addresses)):
            raise _NotFetchedError("has an address that is not of the internet")
        return addresses

    async def _get(self, host: ImageHost, path: str) -> bytes:
        addresses = await self._addresses(host)
        reader, writer = await self._connected(host, addresses[:_ADDRESSES])
        try:
            port = str(host).removeprefix(f"{host.scheme}://")
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: {port}\r\nUser-Agent: llmserve\r\n"
                "Accept: image/png, image/jpeg, image/webp, image/gif\r\n"
                "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            return await _Response().read(reader)
        finally:
            # Not to wait for what the other side still has to say.
            writer.transport.abort()

    async def _connected(
        self, host: ImageHost, addresses: Sequence[str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = self._tls if host.scheme == "https" else None
        name = host.name if tls else None
        for at, address in enumerate(addresses, 1):
            try:
                # An IP address, with which nothing is resolved again.
                return await asyncio.open_connection(
                    address, host.port, ssl=tls, server_hostname=name
                )
            except OSError:
                if at == len(addresses):
                    raise
        raise AssertionError

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()


class _NotFetchedError(Exception):
    """A host sends no image."""


class _Response:
    """Reads one response, within limits. The parser calls its methods."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._has_head = self._is_complete = self._is_long = self._has_length = False
        self._problem = ""

    async def read(self, reader: asyncio.StreamReader) -> bytes:
        head = 0
        while not self._is_complete:
            piece = await reader.read(_PIECE)
            if not piece:
                break
            head += 0 if self._has_head else len(piece)
            self._parser.feed_data(piece)
            if self._has_head and self._parser.get_status_code() != 200:
                status = self._parser.get_status_code()
                redirects = " and redirects are not followed" if 300 <= status < 400 else ""
                raise _NotFetchedError(f"answers with the status {status}{redirects}")
            if not self._has_head and head > _HEAD_BYTES:
                raise _NotFetchedError("sends too long a head")
            if self._problem:
                raise _NotFetchedError(self._problem)
        if not self._is_complete and (self._has_length or not self._has_head):
            raise _NotFetchedError("ends before its answer does")
        return bytes(self._body)

    def on_header(self, name: bytes, value: bytes) -> None:
        name, value = name.lower(), value.strip().lower()
        if name == b"content-encoding" and value != b"identity":
            self._problem = "compresses what it sends"
        elif name == b"content-length":
            self._has_length = True
            if not value.isdigit() or int(value[:18]) > FETCHED_BYTES:
                self._problem = _TOO_LARGE
        elif name == b"transfer-encoding":
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        if len(self._body) + len(body) > FETCHED_BYTES:
            self._problem = _TOO_LARGE
        else:
            self._body += body

    def on_message_complete(self) -> None:
        self._is_complete = True


_TOO_LARGE = f"sends more than {FETCHED_BYTES >> 20} MB"


def _refused(what: str) -> ApiError:
    return bad_request(what, "messages", "image_not_fetched")
