"""What `llmserve serve` says before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from llmserve_cli import serve as serve_module
from llmserve_cli.group import cli
from llmserve_cli.servers import Running


def test_a_port_in_use_names_the_serve_that_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text("")
    (version.parent / "config.pbtxt").write_text('backend: "python"')
    status: dict[str, Any] = {"url": "127.0.0.1:8001", "repository": "/there"}
    monkeypatch.setattr(serve_module, "find_servers", lambda: [Running(Path("s"), status)])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        words = ["serve", str(tmp_path), "--frontend", "none", "--http-port", str(port)]
        words += ["--grpc-port", "0", "--metrics-port", "0", "--runtime", "embedded"]
        result = CliRunner().invoke(cli, words, standalone_mode=False)
    assert f"port {port} for http is in use" in str(result.exception)
    assert "note: another serve runs here, 127.0.0.1:8001 of /there\n" in result.stderr


def test_what_is_loaded_on_demand_is_listed_with_the_addresses() -> None:
    server: Any = SimpleNamespace(
        runtime="Triton", log_file="log", http_url="h", grpc_url="g", metrics_url="m", failures={},
        models=dict, stand_ins=dict,
    )  # fmt: skip
    lines = serve_module._summary([server], [], ["a", "b"]).splitlines()
    assert lines[-2:] == ["  on demand: a, b", "Ctrl-C stops it."]
    assert not any(line.startswith("  models") for line in lines)
