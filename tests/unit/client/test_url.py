"""The address of the server that a client connects to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.client.url import HostAndPort, parse_url
from llmserve.errors import UsageError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("localhost:8001", HostAndPort("localhost", 8001)),
        ("grpc://10.0.0.7:9001", HostAndPort("10.0.0.7", 9001)),
        ("grpc://triton-a_b.example:9001/", HostAndPort("triton-a_b.example", 9001)),
        ("GRPCS://triton.example:443", HostAndPort("triton.example", 443, tls=True)),
        ("[::1]:8001", HostAndPort("[::1]", 8001)),
        ("  127.0.0.1:1 ", HostAndPort("127.0.0.1", 1)),
        # Without a URL, the environment provides it.
        (None, HostAndPort("there", 7, tls=True)),
    ],
)
def test_valid_urls_are_parsed(
    url: str | None, address: HostAndPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSERVE_URL", "grpcs://there:7")
    assert parse_url(url) == address
    assert parse_url(url, tls=True).tls
    monkeypatch.delenv("LLMSERVE_URL")
    assert str(parse_url()) == "127.0.0.1:8001"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://localhost:8000", "gRPC port instead (usually 8001), as in localhost:8001"),
        ("https://localhost", "HTTP address"),
        ("localhost", "has no port"),
        ("localhost:0", "0 is not a port"),
        ("localhost:65536", "is not a port"),
        ("ftp://localhost:21", "use grpc:// or grpcs://"),
        ("local host:8001", "is not a server URL"),
        ("::1:8001", "is not a server URL"),
        ("host:port", "is not a server URL"),
        ("host:8001/v2/models", "is not a server URL"),
    ],
)
def test_refused_urls_name_the_fix(url: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_url(url)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        address = parse_url(text)
    except UsageError:
        return
    assert parse_url(str(address)) == HostAndPort(address.host, address.port)
