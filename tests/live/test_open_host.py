"""With an open address, only what has keys leaves loopback, unless more is asked for in words."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from llmserve_gateway.keys import new_key
from tests.live.servers import ECHO, Serving, fetch, repository

ELSEWHERE = "127.0.0.2"
"""An address of this machine that answers for what listens on all of them, and nothing else."""


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Serving]:
    serve = Serving(str(repository(folder / "models", echo=ECHO)), *words)
    try:
        yield serve
    finally:
        serve.close()


def is_open(url: str) -> bool:
    port = int(re.findall(r":(\d+)", url)[0])
    with suppress(OSError), socket.create_connection((ELSEWHERE, port), timeout=5):
        return True
    return False


def listed(serve: Serving) -> dict[str, tuple[str, str]]:
    """Return the addresses that it printed, and what it said of each."""
    rows = re.findall(r"^  (openai|page|http|grpc|metrics) +(\S+)(?:  (.+))?$", serve.output, re.M)
    return {name: (url, words) for name, url, words in rows}


@pytest.mark.parametrize(
    ("more", "of_triton"), [([], ""), (["--open-triton"], "on all addresses, without keys")]
)
def test_keys_leave_triton_on_loopback_unless_its_ports_are_asked_for(
    tmp_path: Path, more: list[str], of_triton: str
) -> None:
    keys = tmp_path / "keys.json"
    new_key(keys, "me", models=[])
    with serving(tmp_path, "--host", "0.0.0.0", "--keys", str(keys), *more) as serve:
        found = listed(serve)
        assert {name: words for name, (_, words) in found.items()} == {
            **dict.fromkeys(("openai", "page"), "on all addresses, with keys"),
            **dict.fromkeys(("http", "grpc", "metrics"), of_triton),
        }
        reached = {name for name, (url, _) in found.items() if is_open(url)}
        assert reached == {name for name, (_, words) in found.items() if words}
        # The page is where the list says, for who has no key yet.
        with urllib.request.urlopen(found["page"][0], timeout=10) as response:
            assert "<title>llmserve" in response.read().decode()


def test_the_file_says_so_too(tmp_path: Path) -> None:
    models = repository(tmp_path / "model_repository", echo=ECHO)
    file = tmp_path / "llmserve.toml"
    file.write_text(
        f'repository = "{models}"\n[serve]\nhost = "0.0.0.0"\nopen_triton = true\n'
        '[gateway]\nfrontends = ["none"]\n'
    )
    serve = Serving("--config", str(file), cwd=tmp_path)
    try:
        found = listed(serve)
        assert all(map(is_open, (found[name][0] for name in ("http", "grpc", "metrics"))))
        assert fetch(f"{found['http'][0]}/v2")["name"]
    finally:
        serve.close()
