from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.client.url import Address, parse_url
from llmserve.errors import UsageError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("localhost:8001", Address("localhost", 8001)),
        ("grpc://10.0.0.7:9001", Address("10.0.0.7", 9001)),
        ("grpc://triton-a_b.example:9001/", Address("triton-a_b.example", 9001)),
        ("GRPCS://triton.example:443", Address("triton.example", 443, tls=True)),
        ("[::1]:8001", Address("[::1]", 8001)),
        ("  127.0.0.1:1 ", Address("127.0.0.1", 1)),
    ],
)
def test_urls_that_are_understood(url: str, address: Address) -> None:
    assert parse_url(url) == address


def test_the_environment_names_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMSERVE_URL", raising=False)
    assert str(parse_url()) == "127.0.0.1:8001"
    monkeypatch.setenv("LLMSERVE_URL", "grpcs://there:7")
    assert parse_url() == Address("there", 7, tls=True)
    assert parse_url("here:8") == Address("here", 8)


def test_tls_can_be_asked_for() -> None:
    assert parse_url("here:8", tls=True).tls


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://localhost:8000", "gRPC port instead (usually 8001), as in localhost:8001"),
        ("https://localhost", "HTTP address"),
        ("localhost", "names no port"),
        ("localhost:0", "0 is no port"),
        ("localhost:65536", "is no port"),
        ("ftp://localhost:21", "use grpc:// or grpcs://"),
        ("local host:8001", "is no server URL"),
        ("::1:8001", "is no server URL"),
        ("host:port", "is no server URL"),
        ("host:8001/v2/models", "is no server URL"),
    ],
)
def test_urls_that_are_refused_name_the_mend(url: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_url(url)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        address = parse_url(text)
    except UsageError:
        return
    assert parse_url(str(address)) == Address(address.host, address.port)


def test_importing_the_client_loads_no_grpc() -> None:
    code = "import sys, llmserve.client; sys.exit('grpc' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
