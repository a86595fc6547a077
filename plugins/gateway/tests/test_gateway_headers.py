"""What browsers send for pages of others, headers that come twice, and the headers of the page."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmserve_gateway.app import make_app
from llmserve_gateway.gateway import Settings
from llmserve_gateway.keys import new_key

from .gateways import NO_TRITON, TEXT, gateway_command

HERE = "http://127.0.0.1:8080"
LOCAL = Settings(NO_TRITON, local=True)


def ask(settings: Settings, method: str, path: str, headers: Any = (), **request: Any) -> Any:
    async def go() -> Any:
        transport = httpx.ASGITransport(app=make_app(settings))
        async with httpx.AsyncClient(transport=transport, base_url=HERE) as client:
            return await client.request(method, path, headers=headers, **request)

    return asyncio.run(go())


def refusal(answer: Any) -> str | None:
    return answer.json()["error"]["code"] if answer.status_code == 403 else None


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8080", True), ("localhost", True), ("LOCALHOST:1", True), ("[::1]:8080", True),
        ("app.localhost:8080", True), ("127.3.4.5", True), ("evil.com", False), ("0.0.0.0", False),
        ("evil.com:8080", False), ("127.0.0.1.evil.com", False), ("localhost.evil.com", False),
        ("evillocalhost", False), ("", False), ("127.0.0.1@evil.com", False), ("[::1", False),
    ],
)  # fmt: skip
def test_a_name_that_leads_here_is_no_way_in(host: str, allowed: bool) -> None:
    """DNS rebinding: a page of evil.com, whose address is 127.0.0.1 by now."""
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/")):
        answer = ask(LOCAL, method, path, {"host": host})
        assert (refusal(answer) is None) is allowed
        assert refusal(answer) in (None, "host_not_allowed")


def test_other_names_need_permission(tmp_path: Path) -> None:
    named = Settings(NO_TRITON, local=True, allowed_hosts=("gpu.example",))
    for host, allowed in (("gpu.example:80", True), ("localhost", True), ("evil.com", False)):
        assert (refusal(ask(named, "GET", "/", {"host": host})) is None) is allowed
    new_key(tmp_path / "keys", "me")
    others = (
        Settings(NO_TRITON, local=True, allowed_hosts=("*",)),
        Settings(NO_TRITON),
        Settings(NO_TRITON, local=True, keys=tmp_path / "keys"),
    )
    for settings in others:
        assert ask(settings, "GET", "/", {"host": "gpu.example"}).status_code == 200


EVIL = {"origin": "https://evil.com"}
FORM = {"content-type": "text/plain"}


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        (EVIL, False), (EVIL | FORM, False), ({"origin": "null"}, False),
        ({"origin": "http://[::1"}, False),
        ({"origin": "http://127.0.0.1:3000"}, False), ({"origin": "http://localhost:8080"}, False),
        (EVIL | {"sec-fetch-site": "cross-site"}, False), ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"origin": HERE}, True), ({"origin": HERE, "sec-fetch-site": "same-origin"}, True),
        ({"content-type": "application/x-www-form-urlencoded"}, True), ({}, True),
    ],
)  # fmt: skip
def test_a_page_of_another_origin_cannot_post(headers: dict[str, str], allowed: bool) -> None:
    for path in ("/v1/completions", "/tokenize"):
        answer = ask(LOCAL, "POST", path, headers, content=b'{"model": "m", "prompt": "Hi"}')
        assert (refusal(answer) is None) is allowed


def test_pages_with_permission_or_a_key_can_post(tmp_path: Path) -> None:
    named = Settings(NO_TRITON, local=True, cors_origins=("https://a.example",))
    for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
        answer = ask(named, "POST", "/v1/completions", {"origin": origin}, json=TEXT)
        assert (refusal(answer) is None) is allowed
    new_key(tmp_path / "keys", "me")
    # A page cannot send a key that it does not have.
    keyed = Settings(NO_TRITON, keys=tmp_path / "keys")
    for settings, status in ((keyed, 401), (Settings(NO_TRITON, cors_origins=("*",)), 503)):
        assert ask(settings, "POST", "/v1/completions", EVIL, json=TEXT).status_code == status


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/completions"), ("POST", "/tokenize"), ("GET", "/v1/models")]
)
def test_a_header_that_decides_comes_once(tmp_path: Path, method: str, path: str) -> None:
    key = new_key(tmp_path / "keys", "me")
    settings = Settings(NO_TRITON, keys=tmp_path / "keys")
    for name, value in (("authorization", "Bearer "), ("x-api-key", "")):
        for values in ((key, "x"), ("x", key), (key, key)):
            headers = [(name, value + each) for each in values]
            answer = ask(settings, method, path, headers)
            assert answer.status_code == 400
            assert name in answer.json()["error"]["message"]


def test_the_page_loads_nothing_of_others_and_is_framed_by_none() -> None:
    for path in ("/", "/main.js", "/style.css"):
        headers = ask(LOCAL, "GET", path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_a_gateway_on_loopback_checks_the_host_of_raw_requests() -> None:
    with gateway_command("--allowed-host", "gpu.example") as port:
        for host, status in (("evil.com", b"403"), ("gpu.example", b"200"), ("localhost", b"200")):
            with socket.create_connection(("127.0.0.1", port), 60) as connection:
                connection.sendall(b"GET /livez HTTP/1.1\r\nhost: %s\r\n\r\n" % host.encode())
                assert connection.recv(12) == b"HTTP/1.1 " + status
