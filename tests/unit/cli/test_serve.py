"""What `llmserve serve` says before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from llmserve.contract.report import ServerReport, State
from llmserve.contract.warm_prompt import WarmPrompt
from llmserve.errors import UsageError
from llmserve.server import Running, Serving
from llmserve_cli import serve as serve_module
from llmserve_cli.group import cli
from llmserve_cli.reachability import reach


def test_a_port_in_use_names_the_serve_that_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text("")
    (version.parent / "config.pbtxt").write_text('backend: "python"')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        reports = [
            ServerReport(State.READY, url="127.0.0.1:1", http=f"127.0.0.1:{port}", repository="/a"),
            ServerReport(State.READY, url="127.0.0.1:2", http="127.0.0.1:3", repository="/b"),
        ]
        servers = [Running(Path("s"), report) for report in reports]
        monkeypatch.setattr(serve_module, "find_servers", lambda: servers)
        words = ["serve", str(tmp_path), "--frontend", "none", "--http-port", str(port)]
        words += ["--grpc-port", "0", "--metrics-port", "0", "--runtime", "embedded"]
        result = CliRunner().invoke(cli, words, standalone_mode=False)
    assert f"port {port} for http is in use" in str(result.exception)
    assert "note: another serve runs here, 127.0.0.1:1 of /a\n" in result.stderr
    assert "/b" not in result.stderr, "it has none of the ports"


def test_a_file_of_keys_that_is_not_there_is_refused_before_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMSERVE_HOME", str(tmp_path / "home"))
    words = ["serve", "demo", "--plugin", "hf", "--keys", "keys.json"]
    error = CliRunner().invoke(cli, words, standalone_mode=False).exception
    assert (
        str(error) == "there is no file of keys keys.json: llmserve key new NAME --file keys.json"
    )
    assert not (tmp_path / "home").exists()


def test_what_is_loaded_on_demand_is_listed_with_the_addresses() -> None:
    supervisor: Any = None
    server: Any = SimpleNamespace(
        ports=SimpleNamespace(host="127.0.0.1"), runtime="Triton", log_file="log", http_url="h",
        grpc_url="g", metrics_url="m", failures={}, models=dict, stand_ins=dict,
    )  # fmt: skip
    lines = serve_module._summary(Serving([server], [], supervisor, []), ["a", "b"]).splitlines()
    assert lines[-2:] == ["  on demand: a, b", "Ctrl-C stops it."]
    assert not any(line.startswith("  models") for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "no API keys are configured: create a key"),
        (
            ["--host", "0.0.0.0", "--frontend", "none"],
            "nothing would listen on 0.0.0.0: no frontend does, and Triton's own ports stay on "
            "127.0.0.1: --open-triton opens them there, without keys",
        ),
        (
            ["--host", "0.0.0.0", "--frontend-host", "127.0.0.1"],
            "nothing would listen on 0.0.0.0",
        ),
        (["--open-triton"], "--open-triton is for an address that others reach, and 127.0.0.1 is"),
        (
            ["--open-triton", "--frontend-host", "0.0.0.0", "--no-auth"],
            "--open-triton is for an address that others reach, and 127.0.0.1 is",
        ),
    ],
)
def test_what_listens_on_an_open_address_is_asked_for(
    words: list[str], message: str, tmp_path: Path
) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text("")
    (version.parent / "config.pbtxt").write_text('backend: "python"')
    ports = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]
    words = ["serve", str(tmp_path), *ports, "--port", "0", "--runtime", "embedded", *words]
    assert message in str(CliRunner().invoke(cli, words, standalone_mode=False).exception)


@pytest.mark.parametrize(
    ("host", "keys", "words"),
    [
        ("127.0.0.1", True, ""),
        ("localhost", False, ""),
        ("0.0.0.0", True, "  on all addresses, with keys"),
        ("0.0.0.0", False, "  on all addresses, without keys"),
        ("::", True, "  on all addresses, with keys"),
        ("192.0.2.7", False, "  open to others, without keys"),
        ("models.example", True, "  open to others, with keys"),
    ],
)
def test_the_list_says_who_reaches_an_address(host: str, keys: bool, words: str) -> None:
    assert reach(host, keys=keys) == words


@pytest.mark.parametrize(
    ("served", "message"),
    [
        ("none.gguf", "no file at none.gguf: name a local folder, a GGUF file"),
        ("https://huggingface.co/a/b", "is a page of the hub: name its model: a/b"),
        ("./none", "no repository at none: llmserve build creates one"),
    ],
)
def test_what_is_not_there_is_named_as_what_it_looks_like(
    served: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSERVE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ports = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]
    words = ["serve", served, *ports, "--frontend", "none", "--runtime", "embedded"]
    assert message in str(CliRunner().invoke(cli, words, standalone_mode=False).exception)


def test_pages_are_kept_where_and_how_many_serve_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSERVE_HOME", str(tmp_path))
    seen: list[Any] = []

    def check(settings: Any, frontends: Any, *_: Any) -> Any:
        seen.append((dict(settings.env), frontends.place.arguments()))
        raise UsageError("seen")

    monkeypatch.setattr(serve_module, "_checked", check)
    (tmp_path / "models").mkdir()
    for words in ([], ["--warm", "1.5"], ["--warm", "1.5", "--warm-scope", "all"]):
        command = ["serve", str(tmp_path / "models"), *words]
        CliRunner().invoke(cli, command, standalone_mode=False)
    env = {"LLMSERVE_WARM": str(tmp_path / "pages"), "LLMSERVE_WARM_BYTES": "1500000000"}
    assert [each for each, _ in seen] == [{}, env, env]
    scopes = [arguments[-2:] for _, arguments in seen]
    assert "--warm-scope" not in seen[0][1]
    assert scopes[1:] == [["--warm-scope", "key"], ["--warm-scope", "all"]]


def test_prompts_that_models_read_ahead_are_read_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []

    def build(*_: Any) -> Any:
        return tmp_path / "models", ()

    def check(settings: Any, *_: Any) -> Any:
        seen.append(settings.warm_prompts)
        raise UsageError("seen")

    def served(*words: str) -> str:
        return str(CliRunner().invoke(cli, ["serve", *words], standalone_mode=False).exception)

    monkeypatch.setattr(serve_module, "_checked", check)
    Path("models").mkdir()
    Path("llmserve.toml").write_text(
        "[models.m]\nsource = 'demo'\nwarm = ['system.txt']\n", encoding="utf-8"
    )
    assert "models.m.warm: there is no file" in served(), "and nothing was built"
    assert not list(Path("models").iterdir())
    Path("system.txt").write_text("You help.\n", encoding="utf-8")
    Path("keys.json").write_text("[]", encoding="utf-8")
    monkeypatch.setattr(serve_module, "served_repository", build)
    keyed = ["--keys", "keys.json"]
    assert served("--warm", "1", *keyed) == (
        "with --keys and --warm, no request finds the prompts that models read ahead: "
        "--warm-scope all, or leave out warm of the models"
    )
    for words in ([], keyed, ["--warm", "1"], ["--warm", "1", *keyed, "--warm-scope", "all"]):
        assert served(*words) == "seen"
    assert seen == [{"m": (WarmPrompt("system.txt", "You help."),)}] * 4


def test_pages_are_not_kept_in_a_container(tmp_path: Path) -> None:
    words = ["serve", str(tmp_path), "--warm", "1", "--runtime", "docker"]
    error = CliRunner().invoke(cli, words, standalone_mode=False).exception
    assert str(error) == (
        "--warm keeps pages on this machine, which a container does not see: "
        "use --runtime embedded or binary"
    )
