"""Whatever a source has in it, adopting it ends in a file or in one clear line."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmserve.builder.server_file import ServerFile
from llmserve.errors import LLMServeError
from llmserve_cli.group import cli
from tests.unit.cli.adopting.command_lines import LINES
from tests.unit.cli.adopting.repositories import REPOSITORIES

_TOKENS = (
    "\n", " ", "\\\n", "'", '"', "$", "${", "${A:-", "}", "$(", "`", ":", "- ", "{", "}", "[", "]",
    "#", "&a ", "*a", "<<: *a", "!!python/object/apply:os.system ", "--", "=", ";", "|", "\0",
    "\u2028", "\ud800", "vllm serve ", "docker run ", "image: ", "FROM ", "args: ", "2>&1", "-p",
    "config { }", "\t", "9" * 400, "-1", "null", "~", "/../..", "\x1b[31m", "<<EOF",
)  # fmt: skip


def damaged(text: str, seed: int, changes: int) -> str:
    """Return a text with pieces taken out, doubled, exchanged, or put in."""
    choice = random.Random(seed)
    for _ in range(changes):
        at, to = sorted(choice.randrange(len(text) + 1) for _ in range(2))
        to = min(to, at + choice.randrange(1, 40))
        piece = choice.choice(["", text[at:to] * 2, choice.choice(_TOKENS)])
        text = text[:at] + piece + text[to:]
    return text


def ends_clearly(source: str) -> None:
    out = Path("llmserve.toml")
    out.unlink(missing_ok=True)
    result = CliRunner().invoke(cli, ["adopt", source], standalone_mode=False)
    if result.exception is not None:
        assert isinstance(result.exception, LLMServeError), result.exc_info
        assert "\n" not in str(result.exception)
    elif out.exists():
        ServerFile.read(out)


EXAMPLES = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@EXAMPLES
@given(st.sampled_from(LINES), st.integers(0, 1 << 30), st.integers(0, 12))
def test_any_damaged_file(line: object, seed: int, changes: int) -> None:
    text = damaged(line.text, seed, changes)  # type: ignore[attr-defined]
    Path(line.file).write_text(text, encoding="utf-8", errors="replace")  # type: ignore[attr-defined]
    ends_clearly(line.file)  # type: ignore[attr-defined]


@EXAMPLES
@given(st.binary(max_size=300), st.sampled_from(["a.yaml", "a.sh", "Modelfile", "graph.pbtxt"]))
def test_any_bytes(content: bytes, name: str) -> None:
    Path(name).write_bytes(content)
    ends_clearly(name)


@EXAMPLES
@given(st.text(max_size=120))
def test_any_words(text: str) -> None:
    ends_clearly(f"vllm serve a/b {text}")


@EXAMPLES
@given(st.sampled_from([*REPOSITORIES]), st.integers(0, 1 << 30), st.integers(0, 8))
def test_any_damaged_repository(name: str, seed: int, changes: int) -> None:
    make: Callable[[Path], None] = REPOSITORIES[name]
    root = Path("models")
    if not root.exists():
        root.mkdir()
    for old in sorted(root.rglob("*"), reverse=True):
        old.rmdir() if old.is_dir() else old.unlink()
    make(root)
    choice = random.Random(seed)
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        if choice.random() < 0.6:
            text = damaged(path.read_text(encoding="utf-8"), choice.randrange(1 << 30), changes)
            path.write_text(text, encoding="utf-8", errors="replace")
    ends_clearly("models")
