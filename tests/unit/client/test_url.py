"""The address of the server that a client connects to."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.client.url import Endpoint, HostAndPort, parse_url
from llmserve.errors import UsageError
from llmserve.server.settings import free_port


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


def test_a_new_client_does_not_wait_for_what_an_older_one_has_tried_in_vain() -> None:
    """As a gateway's, whose Triton was away for long."""
    port = free_port("127.0.0.1", 0, "test")
    endpoint = Endpoint(f"127.0.0.1:{port}", False, None, None, 5.0)
    with endpoint.open(grpc) as old:
        states: list[tuple[float, grpc.ChannelConnectivity]] = []
        old.subscribe(lambda state: states.append((time.monotonic(), state)), try_to_connect=True)
        time.sleep(3.0)
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            with endpoint.open(grpc) as new:
                began = time.monotonic()
                grpc.channel_ready_future(new).result(10.0)
                assert time.monotonic() - began < 1.0
        finally:
            server.stop(None)
    assert grpc.ChannelConnectivity.TRANSIENT_FAILURE in [state for _, state in states]
