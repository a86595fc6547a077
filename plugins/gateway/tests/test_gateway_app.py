"""The application without Triton: authentication, refusals and error formats."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, cast
from unittest.mock import ANY

import click
import httpx2 as httpx
import jsonschema
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.routing import Route

from llmserve.client import CALL_HEADERS, Completion, ModelInfo, Piece
from llmserve.errors import (
    ConfigError,
    ModelNotReadyError,
    RequestRejectedError,
    RequestTimeoutError,
    UsageError,
)
from llmserve.plugin import Address, Place
from llmserve_gateway import llmserve_register_frontends
from llmserve_gateway.admission import Limits
from llmserve_gateway.app import make_app
from llmserve_gateway.catalog import Catalog
from llmserve_gateway.commands import gateway, silent
from llmserve_gateway.document import make_document
from llmserve_gateway.endpoints import ASKED, OF_OLLAMA, OWN
from llmserve_gateway.gateway import Settings
from llmserve_gateway.keys import new_key
from llmserve_gateway.metrics import Metrics
from llmserve_gateway.tracing import Tracer
from llmserve_gateway.triton_metrics import cache_usage

from .gateways import (
    NO_TRITON,
    TEXT,
    URL,
    SeeingTriton,
    Triton,
    app_before,
    ask,
    certificate,
    gateway_command,
    gateway_process,
    request_via,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
KEYED = [row for row in (*ASKED, *OWN, *OF_OLLAMA) if row.access != "anyone"]
PATHS = [(row.method, row.name.format(name="m")) for row in KEYED]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_every_path_but_health_asks_for_a_key(tmp_path: Path, method: str, path: str) -> None:
    key = new_key(tmp_path / "keys", "me")
    settings = Settings(NO_TRITON, keys=tmp_path / "keys")
    for headers in ({}, {"authorization": f"Bearer {key}x"}, {"x-api-key": "sk-"}):
        answer = ask(settings, method, path, json=TEXT, headers=headers)
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert isinstance(error, str) or error["type"] == "authentication_error"
        assert isinstance(error, str) == path.startswith("/api/")
    for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
        assert ask(settings, method, path, json={}, headers=headers).status_code != 401


def test_a_key_finds_only_what_is_kept_of_its_own_prompts(tmp_path: Path) -> None:
    keys = [new_key(tmp_path / "keys", name) for name in ("one", "two")]
    salts: dict[str, list[str | None]] = {}
    for scope in ("", "all", "key"):
        triton = Triton()
        settings = Settings(NO_TRITON, keys=tmp_path / "keys", warm_scope=scope)
        for key in (*keys, keys[0]):
            headers = {"authorization": f"Bearer {key}"}
            answer = request_via(
                triton, "/v1/completions", settings=settings, json=TEXT, headers=headers
            )
            assert answer.status_code == 200
        salts[scope] = [request.get("cache_salt") for request in triton.requests]
    assert salts[""] == salts["all"] == [None] * 3
    first, second, again = salts["key"]
    assert first == again != second
    assert not any(str(salt) in (tmp_path / "keys").read_text() for salt in salts["key"])


_MARKED = {"cache_control": {"type": "ephemeral"}, "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "is_kept"),
    [
        ("/v1/completions", {**TEXT, "prompt_cache_key": "one"}, True),
        ("/v1/chat/completions", {**CHAT, "prompt_cache_key": "one"}, True),
        ("/v1/responses", {"model": "m", "input": "Hi", "prompt_cache_key": "one"}, True),
        ("/v1/messages", {**CHAT, **_MARKED}, True),
        ("/v1/completions", TEXT, None),
        ("/v1/completions", {**TEXT, "prompt_cache_key": ""}, None),
        ("/v1/messages", {**CHAT, "max_tokens": 1}, None),
    ],
)
def test_a_session_and_a_cache_mark_have_the_model_keep_what_it_computes(
    path: str, body: dict[str, Any], is_kept: bool | None
) -> None:
    triton = Triton()
    assert request_via(triton, path, json=body).status_code == 200
    assert [request.get("keep_longer") for request in triton.requests] == [is_kept]


def test_health_and_the_page_need_no_key(tmp_path: Path) -> None:
    new_key(tmp_path / "keys", "me")
    settings = Settings(NO_TRITON, keys=tmp_path / "keys")
    statuses = {path: ask(settings, "GET", path).status_code for path in ("/", "/livez", "/readyz")}
    assert statuses == {"/": 200, "/livez": 200, "/readyz": 503}


def test_keys_are_read_again_when_their_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    first = new_key(file, "first")
    app = make_app(Settings(NO_TRITON, keys=file))
    gateway = app.state.gateway
    second = new_key(file, "second", models=["a"])
    assert gateway.authenticate({"authorization": f"Bearer {second}"}, {}).name == "second"
    file.write_text('{"keys": []}', encoding="utf-8")
    with pytest.raises(Exception, match="a valid API key"):
        gateway.authenticate({"authorization": f"Bearer {first}"}, {})


@pytest.mark.parametrize("invalid", ['{"keys"', "[]", '{"keys": [{"name": "a", "sha256": "é"}]}'])
def test_an_invalid_key_file_leaves_the_previous_keys_valid(
    tmp_path: Path, invalid: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    key = new_key(file, "me")
    gateway = make_app(Settings(NO_TRITON, keys=file)).state.gateway
    file.write_text(invalid, encoding="utf-8")
    assert gateway.authenticate({"authorization": f"Bearer {key}"}, {}).name == "me"
    assert str(file) in caplog.text
    (frontend,) = llmserve_register_frontends()
    for start in (
        lambda: make_app(Settings(NO_TRITON, keys=file)),
        lambda: frontend.command(Place(NO_TRITON, "127.0.0.1", 8080, 1.0, keys=file)),
    ):
        with pytest.raises(ConfigError, match="not a key file"):
            start()
    with pytest.raises(UsageError, match="a key needs a name"):
        new_key(tmp_path / "others", " ")


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET, HEAD"),
        ("GET", "/v1/nothing", 404, None),
        ("POST", "/v1/nothing", 404, None),
    ],
)
def test_unknown_paths_and_methods(method: str, path: str, status: int, allow: str | None) -> None:
    answer = ask(Settings(NO_TRITON), method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (status, allow)
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_an_unknown_path_of_anthropics_api_answers_in_its_format() -> None:
    for method, path, status in (
        ("POST", "/v1/messages/batches", 404),
        ("GET", "/v1/messages/batches/x", 404),
        ("GET", "/v1/messages", 405),
    ):
        answer = ask(Settings(NO_TRITON), method, path)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert path in answer.json()["error"]["message"]


def test_no_backend_and_shutting_down_are_503() -> None:
    down = ask(Settings(NO_TRITON), "POST", "/v1/completions", json=TEXT)
    assert (down.status_code, down.json()["error"]["code"]) == (503, "backend_unavailable")
    assert down.headers["retry-after"]
    draining = ask(Settings(NO_TRITON), "POST", "/v1/completions", drain=True, json=TEXT)
    assert (draining.status_code, draining.json()["error"]["code"]) == (503, "draining")
    for path in ("/readyz", "/readyz/m"):
        waiting = ask(Settings(NO_TRITON, models=("m",)), "GET", path)
        assert waiting.status_code == 503
        assert "no Triton answers" in waiting.json()["why"]
    ready = ask(Settings(NO_TRITON), "GET", "/readyz", drain=True)
    assert (ready.status_code, ready.json()["why"]) == (503, "shutting down")


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_is_bounded_with_or_without_content_length(path: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(81):
            yield b" " * 65536

    for content in (b" " * (5 << 20), pieces()):
        answer = ask(Settings(NO_TRITON), "POST", path, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    for deep in (b"[" * 200_000, b'{"a":' * 65 + b"1" + b"}" * 65):
        assert ask(Settings(NO_TRITON), "POST", path, content=deep).status_code == 400


def test_a_client_that_writes_before_it_reads_sees_the_refusal() -> None:
    """Far more bytes than the system buffers; and a client that asks first sends none of them."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    length, piece = f"content-length: {20 << 20}\r\n", b" " * (1 << 20)
    chunk = b"100000\r\n" + piece + b"\r\n"
    with gateway_command() as port:
        for header, body in (
            (length, [piece] * 20),
            ("transfer-encoding: chunked\r\n", [*[chunk] * 20, b"0\r\n\r\n"]),
            (f"{length}expect: 100-continue\r\n", []),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                client.sendall(f"{head}{header}\r\n".encode())
                for part in body:
                    client.sendall(part)
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_a_refused_body_without_end_is_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmserve_gateway.bodies._MAX_DISCARDED", 1 << 20)
    read = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 65536
            yield b" " * 65536

    answer = ask(Settings(NO_TRITON), "POST", "/v1/completions", content=pieces())
    assert answer.status_code == 413
    assert read < 8 << 20
    monkeypatch.setattr("llmserve_gateway.bodies._DISCARD_SECONDS", 0.05)

    async def never() -> AsyncIterator[bytes]:
        for _ in range(65):
            yield b" " * 65536
        await asyncio.sleep(60)

    answer = ask(Settings(NO_TRITON), "POST", "/v1/completions", content=never())
    assert answer.status_code == 413


def test_a_compressed_body_is_refused() -> None:
    answer = ask(Settings(NO_TRITON), "POST", "/v1/completions", content=b"\x1f\x8b",
                 headers={"content-encoding": "gzip"})  # fmt: skip
    assert answer.status_code == 415
    assert "'gzip'" in answer.json()["error"]["message"]


def test_pages_of_other_origins_need_permission() -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    named = Settings(NO_TRITON, cors_origins=("https://a.example",))
    preflight = ask(named, "OPTIONS", "/v1/completions", headers=headers)
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    headers["origin"] = "https://b.example"
    for settings in (named, Settings(NO_TRITON)):
        refused = ask(settings, "OPTIONS", "/v1/completions", headers=headers)
        assert "access-control-allow-origin" not in refused.headers


def test_a_body_that_does_not_arrive_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmserve_gateway.bodies._TIMEOUT_SECONDS", 0.05)

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    assert ask(Settings(NO_TRITON), "POST", "/v1/completions", content=never()).status_code == 408


def test_the_models_request_has_the_clients_id() -> None:
    triton = Triton()
    answer = request_via(triton, "/v1/completions", json=TEXT, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    assert triton.requests[0]["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/chat/completions", CHAT, "max_completion_tokens"),
        ("/v1/chat/completions", CHAT, "max_tokens"),
        ("/v1/completions", TEXT, "max_tokens"),
        ("/v1/responses", {"model": "m", "input": "Hi"}, "max_output_tokens"),
    ],
)
def test_an_answer_without_a_length_may_fill_the_context(
    path: str, body: dict[str, Any], limit: str
) -> None:
    triton = Triton()
    assert request_via(triton, path, json=body).status_code == 200
    assert request_via(triton, path, json={**body, limit: 7}).status_code == 200
    free, limited = triton.requests
    assert free["fill_context"] is True
    assert "max_tokens" not in free
    assert limited["max_tokens"] == 7
    assert "fill_context" not in limited


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_span_is_the_parent_of_a_requests_span(stream: bool) -> None:
    exporter = InMemorySpanExporter()
    tracer, triton = Tracer(SimpleSpanProcessor(exporter)), Triton()
    body = {**CHAT, "stream": stream, "top_p": 0.5, "max_tokens": 7, "stop": "secret"}
    client_span, trace = "00f067aa0ba902b7", "4bf92f3577b34da6a3ce929d0e0e4736"
    for flags in ("01", "00"):
        headers = {"traceparent": f"00-{trace}-{client_span}-{flags}", "x-request-id": "mine"}
        request_via(triton, "/v1/chat/completions", tracer, json=body, headers=headers)
        if flags == "00":
            assert triton.headers == {}, "a client that wants no trace gets none"
            break
        (span,) = exporter.get_finished_spans()
        gateway_span = format(span.context.span_id, "016x")
        assert format(span.parent.span_id, "016x") == client_span
        assert triton.headers["traceparent"] == f"00-{trace}-{gateway_span}-01"
    assert CALL_HEADERS.get() == ()
    attributes = dict(span.attributes)
    first = attributes.pop("gen_ai.response.time_to_first_chunk", None)
    assert 0 <= attributes.pop("gen_ai.latency.time_in_queue") < 10
    assert attributes == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "llmserve",
        "gen_ai.request.model": "m", "gen_ai.request.stream": stream,
        "gen_ai.request.choice.count": 1, "gen_ai.request.top_p": 0.5,
        "gen_ai.request.max_tokens": 7, "gen_ai.response.model": "m",
        "gen_ai.usage.input_tokens": 2, "gen_ai.usage.output_tokens": 1,
        "gen_ai.response.finish_reasons": ("length" if stream else "stop",),
        "http.response.status_code": 200, "llmserve.request.id": "mine",
    }  # fmt: skip
    events = ["llmserve.admitted", *(["llmserve.first_token"] if stream else [])]
    assert [event.name for event in span.events] == events
    assert (span.name, first is not None) == ("chat m", stream)


def test_a_span_records_why_a_request_is_refused() -> None:
    exporter = InMemorySpanExporter()
    for body in ({"model": "m", "prompt": 5}, {**TEXT, "seed": "x"}):
        request_via(Triton(), "/v1/completions", Tracer(SimpleSpanProcessor(exporter)), json=body)
    no_collector = Settings(NO_TRITON, collector="http://127.0.0.1:9")
    assert ask(no_collector, "POST", "/v1/completions", json=TEXT).status_code == 503
    for span in exporter.get_finished_spans():
        assert (span.name, span.attributes["error.type"]) == ("text_completion", "400")
        assert span.status.is_unset


def test_the_command_takes_all_that_serve_tells_a_frontend(tmp_path: Path) -> None:
    (frontend,) = llmserve_register_frontends()
    place = Place(
        (Address("a:1", metrics="http://a:2"),), "127.0.0.1", 8081, 2.5, models=("m", "n"),
        keys=tmp_path / "keys", open=True, status=tmp_path / "status", batches=tmp_path / "b",
        collector="http://127.0.0.1:4318", on_demand=True, adapter_folder=tmp_path,
    )  # fmt: skip
    new_key(tmp_path / "keys", "me")
    read = gateway.make_context("gateway", [*frontend.command(place)][2:]).params
    assert (read["urls"], read["triton_metrics"]) == (("a:1",), ("http://a:2",))
    assert (read["host"], read["port"], read["grace"]) == ("127.0.0.1", 8081, 2.5)
    assert (read["models"], read["supervisor"]) == (place.models, place.status)
    assert (read["keys"], read["no_auth"], read["on_demand"]) == (place.keys, True, True)
    assert (read["batches"], read["collector"]) == (place.batches, place.collector)
    assert read["adapter_folder"] == tmp_path
    with pytest.raises(UsageError, match="there is no folder"):
        frontend.command(replace(place, adapter_folder=tmp_path / "absent"))
    alone = gateway.make_context("g", [*frontend.command(replace(place, status=None))][2:]).params
    assert (alone["supervisor"], alone["on_demand"]) == (None, False)


def test_traces_need_an_address_without_secrets_and_an_exporter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (frontend,) = llmserve_register_frontends()
    place = Place(NO_TRITON, "127.0.0.1", 8080, 1.0)
    for bad in ("collector:4318", "grpc://c:4317", "http://me:sesame@c", "http://c/?key=sesame"):
        with pytest.raises(UsageError, match="--otlp-endpoint") as refused:
            frontend.command(replace(place, collector=bad))
        assert "sesame" not in str(refused.value)
    place = replace(place, collector="http://127.0.0.1:4318")
    assert place.collector in frontend.command(place)

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("llmserve_gateway.addresses.version", missing)
    for use in (
        lambda: frontend.command(place),
        lambda: make_app(Settings(NO_TRITON, collector=place.collector)),
    ):
        with pytest.raises(UsageError, match=r"gateway\[tracing\]"):
            use()


def test_the_printed_address_works_for_clients_over_ipv6() -> None:
    command = ["-m", "llmserve_cli", "gateway", "--host", "::1", "--port", "0", "--url", URL]
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address = process.stderr.readline().split()[-1]
            assert address.startswith("http://[::1]:")
            assert httpx.get(address.replace("/v1", "/livez")).status_code == 200
        finally:
            process.kill()


def test_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with gateway_command("--tls-cert", str(cert), "--tls-key", str(key)) as port:
        context = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(f"https://localhost:{port}/livez", verify=context).status_code == 200
    fields = f"tls_cert=Path({str(cert)!r}), tls_key=Path({str(key)!r}), header_seconds=2"
    before = "from pathlib import Path"
    with gateway_process(fields, before=before) as (process, port), ExitStack() as stack:
        files = Path(f"/proc/{process.pid}/fd")
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        for _ in range(3):
            assert httpx.get(f"https://localhost:{port}/livez", verify=context).status_code == 200
        assert len([*files.iterdir()]) < 250, "clients that say nothing make room"
        while len([*files.iterdir()]) > 100:
            time.sleep(0.1)
        process.terminate()
        assert process.wait(20) == 0
    for args in (("--tls-key", str(key)), ("--tls-cert", str(cert)), ("--tls-cert", __file__)):
        with pytest.raises(UsageError, match="--tls-cert"):
            gateway.main(["--port", "0", *args], standalone_mode=False)


@pytest.mark.parametrize(
    "args", [["--url", "here:port"], ["--url", "http://a:1"], ["--max-requests", "0"]]
)
def test_invalid_options_are_refused_before_it_listens(args: list[str]) -> None:
    with pytest.raises((UsageError, click.UsageError), match=r"port|HTTP address|range"):
        gateway.main(["--port", "0", *args], standalone_mode=False)


def test_a_key_is_limited_to_its_tokens_per_minute(tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "me", tokens_per_minute=10)
    headers = {"authorization": f"Bearer {key}"}
    request = {"json": {**TEXT, "prompt": "about eight tokens here"}, "headers": headers}
    settings = Settings(NO_TRITON, keys=tmp_path / "keys")
    first, second = request_via(Triton(), "/v1/completions", settings=settings, times=2, **request)
    assert (first.status_code, second.status_code) == (200, 429)
    assert second.json()["error"]["code"] == "rate_limit_exceeded"
    assert "10 tokens per minute" in second.json()["error"]["message"]
    # 8 + 8, and the answer's 1, are 7 too many, which take 42 s at this rate.
    assert 36 <= int(second.headers["retry-after"]) <= 43
    assert int(second.headers["retry-after-ms"]) <= 43_000
    # Those of the answer are not known yet.
    limits = {name: value for name, value in first.headers.items() if "ratelimit" in name}
    assert float(limits.pop("x-ratelimit-reset-tokens").removesuffix("s")) == pytest.approx(48, 0.1)
    assert limits == {"x-ratelimit-limit-tokens": "10", "x-ratelimit-remaining-tokens": "2"}
    without = request_via(Triton(), "/v1/completions", json=TEXT)
    assert not [name for name in without.headers if "ratelimit" in name]


@pytest.mark.parametrize(("host", "refused"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_serve_checks_the_address_without_loading_a_server(host: str, refused: bool) -> None:
    code = f"""
import sys
from llmserve.errors import UsageError
from llmserve.plugin import Address, Place
from llmserve_gateway import llmserve_register_frontends
(frontend,) = llmserve_register_frontends()
try:
    frontend.command(Place((Address("127.0.0.1:1"),), {host!r}, 8080, 1.0))
    print("accepted")
except UsageError:
    print("refused")
print(sorted({{"starlette", "uvicorn", "grpc", "prometheus_client"}} & sys.modules.keys()))
from llmserve_gateway.app import make_app
from llmserve_gateway.commands import gateway, silent
from llmserve_gateway.document import make_document
from llmserve_gateway.gateway import Settings
make_app(Settings((Address("127.0.0.1:1"),)))
print("opentelemetry" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused" if refused else "accepted", "[]", "False"]


def test_the_document_has_every_path_and_the_limits_of_requests() -> None:
    document = ask(Settings(NO_TRITON), "GET", "/openapi.json").json()
    routes = [route for route in make_app(Settings(NO_TRITON)).routes if isinstance(route, Route)]
    paths = {route.path.replace(":path", "") for route in routes}
    keeping = ("/v1/files", "/v1/batches", "/v1/responses/{", "/v1/conversations")
    kept = {path for path in paths if path.startswith(keeping)}
    assert {*document["paths"]} == paths - kept
    assert {*make_document([], batches=True, responses=True)["paths"]} == paths
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    fields = chat["application/json"]["schema"]["properties"]
    limits = {"type": ["number", "null"], "minimum": 0, "maximum": 2}
    assert limits.items() <= fields["temperature"].items()
    for value, refused in ((fields["temperature"]["maximum"], False), (2.1, True)):
        body = {**CHAT, "temperature": value}
        answer = ask(Settings(NO_TRITON), "POST", "/v1/chat/completions", json=body)
        assert (answer.status_code == 400) is refused


HI = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [HI, {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "ok"}]}),
        ("/v1/chat/completions", {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}),
        ("/v1/responses", {"input": [HI,
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "ok"},
            {"type": "function_call_output", "call_id": "1", "output": [
                {"type": "input_text", "text": "ok"}]}]}),
        ("/v1/responses", {"input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [HI,
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "ok"}]}]}),
        ("/v1/embeddings", {"input": "Hi", "dimensions": 4, "encoding_format": "base64"}),
        ("/v1/embeddings", {"input": [[1, 2], [3]], "encoding_format": None, "normalize": False}),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
        ("/v2/rerank", {"query": "a", "documents": [""], "max_tokens_per_doc": 4096}),
        ("/score", {"queries": "a", "documents": ["b", "c"]}),
        ("/classify", {"input": ["a"], "text_pair": "b", "truncate": True}),
    ],
)  # fmt: skip
def test_the_document_describes_the_requests_that_are_accepted(
    path: str, fields: dict[str, Any]
) -> None:
    document = ask(Settings(NO_TRITON), "GET", "/openapi.json").json()
    content = document["paths"][path]["post"]["requestBody"]["content"]
    body = {"model": "m", **fields}
    jsonschema.validate(body, content["application/json"]["schema"])
    answer = ask(Settings(NO_TRITON), "POST", path, json=body)
    assert answer.status_code == 503, "read, and no Triton is there to answer it"


def test_a_model_without_requests_has_metrics_to_scale_by() -> None:
    metrics = Metrics()
    metrics.update(["m"], [], {})
    assert 'vllm:num_requests_running{model_name="m"} 0.0' in metrics.text().decode()


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_a_model_that_is_not_the_only_one_is_named_in_the_refusal(path: str) -> None:
    body = {"model": "other", "prompt": "Hi", "tokens": [1]}
    error = request_via(Missing(), path, json=body).json()["error"]
    assert (error["code"], "'other'" in error["message"]) == ("model_not_found", True)
    assert "does not report" in request_via(Triton(), path, json={**body, "model": None}).text
    nameless = request_via(Triton(), path, json={**body, "model": 1}).json()["error"]
    assert nameless["param"] == "model"


class Missing(Triton):
    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        if name != "m":
            raise ModelNotReadyError(f"there is no model {name!r}")
        return await super().model(name, refresh=refresh)


def test_only_metrics_can_be_opened(tmp_path: Path) -> None:
    new_key(tmp_path / "keys", "me")
    settings = Settings(NO_TRITON, keys=tmp_path / "keys", open_metrics=True)
    statuses = {path: ask(settings, method, path, json=TEXT).status_code for method, path in PATHS}
    opened = {path for path, status in statuses.items() if status != 401}
    assert opened == {"/metrics", "/metrics/triton"}


def test_one_ready_model_is_enough_unless_all_are_required() -> None:
    """One of two models has died; a third, which the settings name, does not exist."""

    class Two(Triton):
        async def models(self) -> list[str]:
            return ["a", "b"]

        async def model_ready(self, name: str) -> bool:
            return True

        async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
            if name == "c":
                raise RequestRejectedError("there is no model 'c'")
            tensors: Any = {"text_input": None, "text_output": None}
            return ModelInfo(name, "unary", False, None, tensors, tensors, "0.1")

    async def go(dead: str, *named: str) -> list[int]:
        app = app_before(Two(), Settings(NO_TRITON, models=named))
        app.state.gateway.catalog.health(dead).died(0.0, "it has died")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            paths = ("/readyz", "/readyz?all", "/readyz/a", "/readyz/b", "/readyz/c")
            return [(await client.get(path)).status_code for path in paths]

    assert asyncio.run(go("x")) == [200, 200, 200, 200, 404]
    assert asyncio.run(go("b")) == [200, 503, 200, 503, 404]
    assert asyncio.run(go("x", "a", "c")) == [200, 503, 200, 404, 503]


def test_a_client_in_a_hurry_does_not_make_a_model_unready_for_others() -> None:
    class Slow(Triton):
        async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
            raise RequestTimeoutError(f"no answer within {options['timeout']} s")

    async def go() -> list[int]:
        app = app_before(Slow())
        transport, hurry = httpx.ASGITransport(app=app), {"x-request-timeout": "0.01"}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            late = [await client.post("/v1/completions", json=TEXT, headers=hurry) for _ in "123"]
            return [response.status_code for response in (*late, await client.get("/readyz"))]

    assert asyncio.run(go()) == [504, 504, 504, 200]


def test_a_404_does_not_offer_parts_of_ensembles() -> None:
    class Ensemble(Triton):
        async def models(self) -> list[str]:
            return ["whole", "whole-part"]

        async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
            if name not in await self.models():
                raise ModelNotReadyError(f"the server does not have {name!r}", hint="load it")
            parts = ("whole-part",) if name == "whole" else ()
            tensors: Any = {"text_input": None, "text_output": None}
            return ModelInfo(name, "unary", False, 1, tensors, tensors, "0.1", parts=parts)

    catalog = Catalog(lambda: cast(Any, Ensemble()))
    assert asyncio.run(catalog.info("whole")).name == "whole"
    with pytest.raises(ModelNotReadyError) as caught:
        asyncio.run(catalog.info("hole"))
    assert str(caught.value) == "the server does not have 'hole': choose one of whole"


def test_a_models_description_is_refreshed_because_it_may_be_rebuilt() -> None:
    class Rebuilt(Triton):
        length = 512

        async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
            return Completion(json.dumps({"ids": [], "text": "", "context_length": self.length}))

    async def go() -> None:
        app = app_before(triton := Rebuilt())
        catalog = app.state.gateway.catalog
        assert await catalog.context_length("m") == 512
        triton.length = 128
        watching = asyncio.ensure_future(catalog.watch(0.01))
        deadline = time.monotonic() + 30
        while await catalog.context_length("m") != 128:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(go())


def test_cache_usage_is_computed_from_the_engines_metrics() -> None:
    page = """# TYPE llmserve_cache_tokens gauge
llmserve_cache_tokens{model="ours"} 1000
llmserve_cache_used_tokens{model="ours"} 250
llmserve_cache_tokens{model="of no size"} 0
llmserve_cache_used_tokens{model="of no size"} 7
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="t",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="t",version="1"} 3
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="t",version="1"} 4
nv_inference_count{model="x",version="1"} 9
"""
    assert cache_usage(page) == {"ours": 0.25, "t": 0.75}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_usage_says_how_much_of_a_prompt_was_cached_if_the_model_does(path: str) -> None:
    class Caching(Triton):
        async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
            answer = await super().generate(name, prompt, **options)
            return replace(answer, extra={"num_cached_tokens": 64})

        async def stream(self, name: str, prompt: str, **options: Any) -> AsyncIterator[Piece]:
            yield Piece("x", input_tokens=70, output_tokens=1)
            yield Piece("", finish_reason="stop", extra={"num_cached_tokens": 64})

    messages = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Hi"},
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": "Hi"},
    }
    body = bodies[path]
    field = "input_tokens_details" if path == "/v1/responses" else "prompt_tokens_details"
    usage = request_via(Caching(), path, json={"model": "m", **body}).json()["usage"]
    written = {"cache_write_tokens": 0} if path == "/v1/responses" else {}
    assert usage[field] == {"cached_tokens": 64, **written}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    if path == "/v1/responses":
        del options["stream_options"]
    stream = request_via(Caching(), path, json={"model": "m", **body, **options}).text
    assert '"cached_tokens":64' in stream
    plain = request_via(Triton(), path, json={"model": "m", **body}).json()["usage"]
    assert plain.get(field, {"cached_tokens": 0}) == {"cached_tokens": 0, **written}
    # A model of someone else may say anything.
    count = {"model": "m", "messages": messages, "max_tokens": 1}
    usage = request_via(Caching(), "/v1/messages", json=count).json()["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (0, 64)
    stream = request_via(Caching(), "/v1/messages", json={**count, "stream": True}).text
    assert '"input_tokens":6,"cache_creation_input_tokens":0,"cache_read_input_tokens":64' in stream


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/audio/speech", "speech or transcription"),
        ("/v1/audio/transcriptions", "speech or transcription"),
        ("/v1/images/generations", "images"),
        ("/v1/moderations", "moderation"),
        ("/v1/fine_tuning/jobs", "fine-tuning"),
        ("/v1/assistants", "assistants"),
        ("/v1/threads/t/runs", "assistants"),
    ],
)
def test_what_the_server_does_not_have_is_named(path: str, what: str) -> None:
    answer = ask(Settings(NO_TRITON), "POST", path, json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_found")
    assert error["message"] == (
        f"there is no endpoint POST {path}: this server has text models, and no {what}; "
        "GET /openapi.json lists it all"
    )


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/imagesque", "/v1/messages/batches"])
def test_other_paths_are_only_said_to_be_missing(path: str) -> None:
    answer = ask(Settings(NO_TRITON), "POST", path, json={})
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message) == (404, f"there is no endpoint POST {path}")


@pytest.mark.parametrize(
    ("ids", "around", "bare"),
    [
        ([1, 5, 6], [1], [5, 6]),
        ([5, 6, 2], [2], [5, 6]),
        ([1, 5, 6, 2], [1, 2], [5, 6]),
        ([5, 6], [], [5, 6]),
        ([1], [1], [1]),
    ],
)
def test_tokens_without_those_around_each_text(
    ids: list[int], around: list[int], bare: list[int]
) -> None:
    class Tokenizing(Triton):
        async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
            about = {"ids": ids if prompt else [], "text": "", "context_length": 64,
                     "special_tokens": {"eos_token": None, "around": around}}  # fmt: skip
            return Completion(json.dumps(about), "stop", 1, 1)

    asked = {"model": "m", "prompt": "x", "add_special_tokens": False}
    assert request_via(Tokenizing(), "/tokenize", json=asked).json()["tokens"] == bare
    whole = {"model": "m", "prompt": "x"}
    assert request_via(Tokenizing(), "/tokenize", json=whole).json()["tokens"] == ids


PICTURE = {"url": "data:image/png;base64,AA=="}
LARGE_PICTURE = {"url": "data:image/png;base64," + "A" * 1_500_000}

SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA=="}
ELSEWHERE: list[Any] = ["http://169.254.169.254/", {}, 1]
IMAGES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"type": "image_url", "image_url": PICTURE}),
    ("/v1/responses", {"type": "input_image", "image_url": PICTURE["url"]}),
    ("/v1/messages", {"type": "image", "source": SOURCE}),
]


def with_part(path: str, part: Any) -> dict[str, Any]:
    field = "input" if path == "/v1/responses" else "messages"
    parts = [{"type": "text", "text": "What is this?"}, part]
    limit = {"max_tokens": 1} if path == "/v1/messages" else {}
    return {"model": "m", field: [{"role": "user", "content": parts}], **limit}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/embeddings", "/v1/embeddings"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1", "/v1/models"),
        ("/v1/", "/v1/models"),
        ("/v1/chatcompletions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chatcompletions", "/v1/chat/completions"),
        ("/v1/embedding", "/v1/embeddings"),
    ],
)
def test_a_wrong_base_address_is_told_the_right_one(path: str, meant: str) -> None:
    answer = ask(Settings(NO_TRITON), "POST", path, json={})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404
    said = message.removeprefix(f"there is no endpoint POST {path}: ")
    assert meant in re.findall(r"/[a-z0-9/]*", said), message
    assert (answer.json().get("type") == "error") == ("messages" in path)


@pytest.mark.parametrize(("path", "part"), IMAGES)
def test_images_reach_a_model_that_has_an_input_for_them(path: str, part: Any) -> None:
    triton = SeeingTriton()
    answer = request_via(triton, path, json=with_part(path, part))
    assert answer.status_code == 200, answer.text
    (options,) = triton.requests
    assert options["image_url"] == [PICTURE["url"]]
    (message,) = options["messages"]
    assert message["content"] == [{"type": "text", "text": "What is this?"}, {"type": "image"}]


@pytest.mark.parametrize(
    "more",
    [
        with_part("/v1/chat/completions", {**IMAGES[0][1], "image_url": LARGE_PICTURE}),
        {"messages": [{"role": "user", "content": "Hi"}],
         "structured_outputs": {"grammar": "x" * 1_500_000}},
    ],
)  # fmt: skip
def test_what_waiting_requests_hold_in_memory_is_limited(more: Any, tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "me", tokens_per_minute=5000)
    settings = Settings(
        NO_TRITON, Limits(max_queued_tokens=9000), keys=tmp_path / "keys", models=("m",)
    )
    gate = asyncio.Event()

    class Waiting(SeeingTriton):
        async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
            info = await super().model(name, refresh=refresh)
            return replace(info, inputs={**info.inputs, "grammar": ANY})

        async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
            await gate.wait()
            return await super().generate(name, prompt, **options)

    async def go() -> None:
        app = app_before(Waiting(), settings)
        app.state.gateway.catalog.health("m")
        transport = httpx.ASGITransport(app=app)
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, headers=headers) as client:
            ask = partial(client.post, "http://gateway/v1/chat/completions")
            first = asyncio.ensure_future(ask(json={**more, "model": "m"}))
            while not app.state.gateway.admission.running:
                await asyncio.sleep(0.001)
            second = await ask(json={**more, "model": "m"})
            error = second.json()["error"]
            assert (second.status_code, error["code"]) == (429, "queue_full")
            assert "prompts and images that count as" in error["message"]
            small = asyncio.ensure_future(ask(json={**more, **CHAT, "structured_outputs": None}))
            while app.state.gateway.admission.running < 2:
                await asyncio.sleep(0.001)
            gate.set()
            answers = await asyncio.gather(first, small)
            # A key's limits are of tokens, and not of bytes.
            assert [answer.status_code for answer in answers] == [200, 200]
            assert not app.state.gateway.admission.tokens

    asyncio.run(asyncio.wait_for(go(), 20))


@pytest.mark.parametrize(("path", "part"), IMAGES)
def test_a_model_that_reads_only_text_gets_no_images(path: str, part: Any) -> None:
    triton = Triton()
    answer = request_via(triton, path, json=with_part(path, part))
    assert (answer.status_code, triton.requests) == (400, [])
    assert "'m' reads only text" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "part", "words"),
    [
        (
            "/v1/chat/completions",
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            "'input_audio': only text and images are supported",
        ),
        *(
            (path, {**part, "image_url": url}, "an image that is not in the request")
            for path, part in IMAGES[:2]
            for url in ELSEWHERE
        ),
        (
            "/v1/messages",
            {"type": "image", "source": {"type": "url", "url": "http://x"}},
            "an image that is not in the request",
        ),
        (
            "/v1/messages",
            {"type": "image", "source": {**SOURCE, "media_type": "text/html"}},
            "an image that is not in the request",
        ),
        (
            "/v1/chat/completions",
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,A\nA"}},
            "an image that is not in the request",
        ),
    ],
)
def test_sound_and_images_from_elsewhere_are_refused(path: str, part: Any, words: str) -> None:
    answer = request_via(SeeingTriton(), path, json=with_part(path, part))
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_model_is_described_outside_the_trace_of_who_asks_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    async def describe(catalog: Catalog, name: str, process: object = None) -> None:
        seen.append(CALL_HEADERS.get())

    async def main() -> None:
        CALL_HEADERS.set((("traceparent", "00-1-2-01"),))
        assert await Catalog(lambda: cast(Any, None)).context_length("m") is None

    monkeypatch.setattr(Catalog, "_describe", describe)
    asyncio.run(main())
    assert seen == [()]


def test_a_gateway_says_where_nothing_listens_yet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert silent([address]) == []
    assert silent([address, address]) == [address, address]


class _Printed(Triton):
    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        return replace(await super().model(name), fingerprint=FINGERPRINT)


FINGERPRINT = "fp_" + "-".join(["abcde"] * 6)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_an_answer_names_what_it_depends_on(path: str, stream: bool) -> None:
    body = {"model": "m", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    del body["messages" if path == "completions" else "prompt"]
    for triton, expected in ((_Printed(), FINGERPRINT), (Triton(), None)):
        answer, listed = asyncio.run(_ask_both(triton, path, {**body, "stream": stream}))
        lines = answer.text.split("data: ")[1:-1] if stream else [answer.text]
        assert {json.loads(line).get("system_fingerprint") for line in lines} == {expected}
        (model,) = listed.json()["data"]
        assert model["fingerprint"] == (expected or "")


async def _ask_both(triton: Triton, path: str, body: Any) -> tuple[httpx.Response, httpx.Response]:
    transport = httpx.ASGITransport(app=app_before(triton))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.post(f"/v1/{path}", json=body), await client.get("/v1/models")
