"""Who asks for the readers of an answer, and with what."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmserve.client import ToolFormats

ROOT = Path(__file__).parents[3]
PLACES = ["llmserve", "cli/llmserve_cli", "plugins"]
EXPECTED = list(inspect.signature(ToolFormats.readers).parameters)[1:]


def calls_of_readers() -> Iterator[tuple[str, ast.Call, bool]]:
    for place in PLACES:
        for path in sorted((ROOT / place).rglob("*.py")):
            text = path.read_text("utf-8")
            if ".readers(" not in text:
                continue
            tree = ast.parse(text)
            awaited = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Await)}
            for node in ast.walk(tree):
                function = node.func if isinstance(node, ast.Call) else None
                if isinstance(function, ast.Attribute) and function.attr == "readers":
                    assert isinstance(node, ast.Call)
                    yield f"{path.name}:{node.lineno}", node, id(node) in awaited


FOUND = list(calls_of_readers())


def test_the_client_and_the_gateway_ask_for_readers() -> None:
    assert {where.partition(":")[0] for where, _, _ in FOUND} >= {"aio.py", "gateway.py"}


@pytest.mark.parametrize(
    ("call", "awaited"), [one[1:] for one in FOUND], ids=[w for w, *_ in FOUND]
)
def test_readers_are_asked_for_with_what_they_take_in_its_order(
    call: ast.Call, awaited: bool
) -> None:
    given = [ast.unparse(argument).rpartition(".")[2] for argument in call.args]
    given += [keyword.arg or "**" for keyword in call.keywords]
    assert given == EXPECTED
    assert awaited
