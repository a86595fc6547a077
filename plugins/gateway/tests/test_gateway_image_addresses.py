"""Addresses of images: only of hosts that an operator names, whatever users write."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llmserve.errors import UsageError
from llmserve.plugin import Address, Place
from llmserve_gateway import image_fetching, llmserve_register_frontends
from llmserve_gateway.commands import gateway
from llmserve_gateway.errors import ApiError
from llmserve_gateway.gateway import Settings
from llmserve_gateway.image_fetching import MAX_ADDRESSES, SECONDS, ImageFetcher
from llmserve_gateway.image_hosts import is_public, read_address, read_hosts
from llmserve_gateway.text_requests import FETCHED_BYTES, ParsedRequest

from .gateways import NO_TRITON, SeeingTriton, request_via

PNG = b"\x89PNG\r\n\x1a\n" + b"x" * 90
SHOWN = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
HOST = "images.example.com"
OFF = "an image that is not in the request, and this server opens no addresses"
ELSEWHERE = "image 1 is at no host that this server opens"


def resolved(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Have every name mean these addresses, and return the names that are resolved."""
    names: list[str] = []

    async def resolve(loop: Any, name: str, port: int, **more: Any) -> list[Any]:
        del loop, more
        names.append(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    return names


def fetched(fetcher: ImageFetcher, *urls: str) -> list[str]:
    options: dict[str, Any] = {"image_url": [*urls]}
    asyncio.run(fetcher.fetch(options))
    return list(options["image_url"])


def refusal(fetcher: ImageFetcher, *urls: str) -> str:
    with pytest.raises(ApiError) as refused:
        fetched(fetcher, *urls)
    assert refused.value.status == 400
    return refused.value.message


# Where an address that looks like the named host leads to, or is another spelling of a machine.
ATTACKS = [
    "http://169.254.169.254/latest/meta-data/", "http://127.0.0.1/", "http://127.1/",
    "http://2130706433/", "http://0x7f000001/", "http://0x7f.0.0.1/", "http://0177.0.0.1/",
    "http://017700000001/", "http://0/", "http://localhost/", "http://localhost.localdomain/",
    "http://[::1]/", "http://[::]/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:a9fe:a9fe]/",
    "http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[fd00:ec2::254]/",
    "http://[64:ff9b::7f00:1]/", "http://metadata.google.internal/", "http://100.100.100.200/",
    f"https://{HOST}./", f"https://{HOST}.evil.example/", f"https://evil.example/{HOST}",
    f"https://evil.example?{HOST}", f"https://evil.example#{HOST}", f"https://a.{HOST}/",
    f"https://{HOST}@evil.example/", f"https://evil.example@{HOST}/", f"https://{HOST}:x@evil.ex/",
    f"https://{HOST}%2eevil.example/", f"https://{HOST}\\@evil.example/", f"https://{HOST}\\.evil/",
    f"https://{HOST}:80/", f"https://{HOST}:0443x/", f"https://{HOST}:99999/", f"http://{HOST}/",
    f"https:///{HOST}/", f"https://{HOST}/a b", f"https://{HOST}/\r\nHost: evil", f"https://{HOST}\t",
    f"https://{HOST}/\x00", f"https://{HOST}/é", "https://ⓘmages.example.com/",
       "https://images。example。com/", "https://xn--mages-n4a.example.com/", "https://", "http://.",
    "https://images..example.com/", "https://-images.example.com/", "https://images_.example.com/",
    f"HTTPS://{HOST.upper()}.:443/", "http://1.1.1.1/", "http://0x1/", "http://a.0x7f/", "http://a.1/",
]  # fmt: skip


@pytest.mark.parametrize("url", ATTACKS)
def test_no_spelling_reaches_what_is_not_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = resolved(monkeypatch, "93.184.216.34")
    assert refusal(ImageFetcher([HOST]), url).startswith(ELSEWHERE)
    assert OFF in refusal(ImageFetcher([]), url)
    assert names == []


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://images.example.com/a", "gopher://x/", "//x/", "jar:http://x/"]
)  # fmt: skip
def test_other_schemes_are_not_even_addresses(url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    settings = Settings(NO_TRITON, image_hosts=(HOST,))
    answer = request_via(SeeingTriton(), "/v1/chat/completions", json=body, settings=settings)
    assert answer.status_code == 400
    assert "an image that is not in the request" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1",
     "169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1", "192.88.99.1",
     "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1",
     "255.255.255.255", "168.63.129.16", "::", "::1", "::127.0.0.1", "::ffff:10.0.0.1",
     "::ffff:8.8.8.8", "fe80::1", "fe80::1%eth0", "2606:4700::1%eth0", "fec0::1", "fd00:ec2::254",
     "fc00::1", "ff02::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "100::1",
     "2001::1", "2001:db8::1", "2002:7f00:1::", "3fff::1", "5f00::1", "4000::1", "", "localhost"],
)  # fmt: skip
def test_a_name_that_means_a_private_address_is_not_opened(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_public(address)
    opened = []
    monkeypatch.setattr(asyncio, "open_connection", lambda *a, **k: opened.append(a))
    # One public address beside it makes it no better.
    for addresses in ((address,), ("93.184.216.34", address)):
        resolved(monkeypatch, *addresses)
        said = refusal(ImageFetcher([HOST]), f"https://{HOST}/a.png")
        assert said == f"image 1: {HOST} has an address that is not of the internet"
    assert opened == []


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "2606:4700::6810:84e5", "64:ff9b::808:808"]
)
def test_the_connection_goes_to_the_address_that_was_checked(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_public(address)
    names, opened = resolved(monkeypatch, address), []

    async def connect(where: str, port: int, **how: Any) -> Any:
        opened.append((where, port, how["server_hostname"], how["ssl"].verify_mode.name))
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", connect)
    said = refusal(ImageFetcher([HOST]), f"https://{HOST.upper()}/a.png?x=1#y")
    assert said == f"image 1: {HOST} cannot be reached, or does not answer as it should"
    # The name is resolved once, and its certificate has to be that of the name.
    assert (names, opened) == ([HOST], [(address, 443, HOST, "CERT_REQUIRED")])


@pytest.mark.parametrize(
    ("named", "url", "found"),
    [
        (HOST, f"https://{HOST}/a", ("https", HOST, 443, "/a")),
        (HOST.upper(), f"https://{HOST}:443?q", ("https", HOST, 443, "/?q")),
        (f"http://{HOST}", f"HTTP://{HOST}", ("http", HOST, 80, "/")),
        (f"http://{HOST}:8000", f"http://{HOST}:08000/#f", ("http", HOST, 8000, "/")),
        ("xn--bcher-kva.example", "https://xn--bcher-kva.example/", None),
    ],
)
def test_hosts_are_named_by_name_or_address(named: str, url: str, found: Any) -> None:
    (host,) = read_hosts([named])
    read = read_address(url)
    assert read is not None
    assert read[0] == host
    assert found is None or (host.scheme, host.name, host.port, read[1]) == found


@pytest.mark.parametrize(
    "named",
    ["", "*", "*.example.com", "localhost", "127.0.0.1", "http://2130706433", "[::1]", "a.b/c",
     "a.b/", "http://a.b:0", "http://u@a.b", "ftp://a.b", "bücher.example", "a.b.", "a b.c",
     "a.b?x", "a.0x1"],
)  # fmt: skip
def test_what_names_no_host_is_refused_before_anything_starts(named: str) -> None:
    with pytest.raises(UsageError, match="is no host of images"):
        read_hosts([named])
    (frontend,) = llmserve_register_frontends()
    with pytest.raises(UsageError, match="--allow-image-host"):
        frontend.command(Place(NO_TRITON, "127.0.0.1", 8080, 1.0, image_hosts=(named,)))


def test_serve_hands_the_hosts_over() -> None:
    (frontend,) = llmserve_register_frontends()
    place = Place((Address("a:1"),), "127.0.0.1", 8081, 2.5, image_hosts=(HOST, "http://b.example"))
    read = gateway.make_context("gateway", [*frontend.command(place)][2:]).params
    assert read["image_hosts"] == place.image_hosts


DOORS: list[tuple[str, Callable[[str], Any]]] = [
    ("/v1/chat/completions", lambda url: {"type": "image_url", "image_url": {"url": url}}),
    ("/v1/responses", lambda url: {"type": "input_image", "image_url": url}),
    ("/v1/messages", lambda url: {"type": "image", "source": {"type": "url", "url": url}}),
    ("/tokenize", lambda url: {"type": "image_url", "image_url": url}),
]


def asked(path: str, part: Any) -> Any:
    field = "input" if path == "/v1/responses" else "messages"
    limit = {"max_tokens": 1} if path == "/v1/messages" else {}
    return {"model": "m", field: [{"role": "user", "content": [part]}], **limit}


@pytest.mark.parametrize(("path", "part"), DOORS)
def test_every_door_refuses_addresses_unless_they_are_named(
    path: str, part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, triton = resolved(monkeypatch, "127.0.0.1"), SeeingTriton()
    body = asked(path, part(f"https://{HOST}/a.png"))
    answer = request_via(triton, path, json=body)
    assert (answer.status_code, triton.requests, names) == (400, [], [])
    assert OFF in answer.json()["error"]["message"]
    # The allowance of tests is no setting: what is named and private is refused.
    settings = Settings(NO_TRITON, image_hosts=(HOST,))
    answer = request_via(triton, path, json=body, settings=settings)
    assert (answer.status_code, triton.requests, names) == (400, [], [HOST])
    assert "has an address that is not of the internet" in answer.json()["error"]["message"]


OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = b"content-length: %d\r\n\r\n"
NOT_AS_IT_SHOULD = "cannot be reached, or does not answer as it should"
LARGE = "sends more than 5 MB"
ANSWERS: list[tuple[str, bytes, str]] = [
    ("length", OK + LENGTH % len(PNG) + PNG, ""),
    ("close", OK + b"\r\n" + PNG, ""),
    ("chunked", OK + b"transfer-encoding: chunked\r\n\r\n62\r\n" + PNG + b"\r\n0\r\n\r\n", ""),
    ("redirect", b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\n" + LENGTH % 0,
     "answers with the status 302 and redirects are not followed"),
    ("absent", b"HTTP/1.1 404 No\r\n" + LENGTH % 0, "answers with the status 404"),
    ("begun", b"HTTP/1.1 100 Continue\r\n\r\n", "answers with the status 100"),
    ("text", OK + LENGTH % 6 + b"secret", "does not send a PNG, JPEG, WebP or GIF there"),
    ("empty", OK + LENGTH % 0, "does not send a PNG, JPEG, WebP or GIF there"),
    ("cut", OK + LENGTH % 500 + PNG, "ends before its answer does"),
    ("silent", b"", "ends before its answer does"),
    ("packed", OK + b"content-encoding: gzip\r\n" + LENGTH % 3 + b"abc",
     "compresses what it sends"),
    ("says_large", OK + LENGTH % (FETCHED_BYTES + 1), LARGE),
    ("says_huge", OK + b"content-length: " + b"9" * 18 + b"\r\n\r\n", LARGE),
    ("large", OK + b"\r\n" + PNG + b"\0" * FETCHED_BYTES, LARGE),
    ("head", OK + b"a: " + b"b" * 70_000, "sends too long a head"),
    ("heads", OK + b"a: b\r\n" * 20_000, "sends too long a head"),
    ("upgrade", b"HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", NOT_AS_IT_SHOULD),
    ("noise", b"SSH-2.0-OpenSSH\r\n", NOT_AS_IT_SHOULD),
]  # fmt: skip


class Pictures:
    """A server of this machine, which answers each path as a row says."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.hangs = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        name = head.split(b" ")[1].decode()[1:].partition("?")[0]
        if name == "hang":
            writer.write(OK)
            await self.hangs.wait()
        writer.write({each: content for each, content, _ in ANSWERS}.get(name, b""))
        writer.close()


def test_a_named_host_is_asked_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved(monkeypatch, "127.0.0.1")

    async def go() -> None:
        pictures = Pictures()
        server = await asyncio.start_server(pictures.answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        base = f"http://{HOST}:{port}"
        # No setting has this allowance: it is for this test alone.
        fetcher = ImageFetcher([base], may_open=lambda address: address == "127.0.0.1")

        async def ask(*names: str) -> Any:
            options: dict[str, Any] = {"image_url": [f"{base}/{name}" for name in names]}
            try:
                await fetcher.fetch(options)
            except ApiError as error:
                return error.message if error.code == "image_not_fetched" else error
            return options["image_url"]

        for name, _, problem in ANSWERS:
            found = await ask(name)
            assert found == (f"image 1: {HOST} {problem}" if problem else [SHOWN]), name
        pictures.heads.clear()
        assert await ask("length?a=1", "close", "length?a=1") == [SHOWN] * 3
        assert sorted(pictures.heads)[1].startswith(
            f"GET /length?a=1 HTTP/1.1\r\nHost: {HOST}:{port}\r\n".encode()
        )
        assert len(pictures.heads) == 2
        assert await ask("length", "text") == (
            f"image 2: {HOST} does not send a PNG, JPEG, WebP or GIF there"
        )
        many = [f"length?{number}" for number in range(MAX_ADDRESSES + 1)]
        assert len(await ask(*many[:-1])) == MAX_ADDRESSES
        assert "9 addresses of images are more than 8: send fewer" in str(await ask(*many))
        monkeypatch.setattr(image_fetching, "MAX_TOTAL_BYTES", 150)
        assert "MB together: send fewer" in await ask("length", "close")
        monkeypatch.setattr(image_fetching, "SECONDS", 0.1)
        assert await ask("hang") == "images did not arrive within 0.1 s: send them in the request"
        pictures.hangs.set()
        server.close()

    assert SECONDS <= 10
    asyncio.run(asyncio.wait_for(go(), 20))


def test_what_an_address_may_bring_counts_while_it_waits() -> None:
    request = ParsedRequest("m", {"image_url": [f"https://{HOST}/a.png"], "messages": [{}]})
    with_it = replace(request, options={**request.options, "image_url": [SHOWN]})
    assert request.held_tokens - with_it.held_tokens > FETCHED_BYTES / 256
    assert request.estimated_tokens == with_it.estimated_tokens
