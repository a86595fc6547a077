"""Who asks for the readers of an answer, and with what."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmserve.client import ModelInfo, TensorInfo, ToolFormats, Tools

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
    assert {where.partition(":")[0] for where, _, _ in FOUND} >= {"aio.py", "text_dialect.py"}


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


MARK = "<\uff5ctool▁{}\uff5c>".format
NATIVE = "".join(
    [MARK("calls▁begin"), MARK("call▁begin"), "add", MARK("sep"), '{"a": 1}', MARK("call▁end"),
     MARK("calls▁end")]
)  # fmt: skip
ASKED = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
# DeepSeek V3.1's shows the calls of a conversation, and no tools.
TEMPLATE = "{{ messages }}{{ '" + MARK("call▁begin") + "' }}"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("said", [NATIVE, ASKED])
@pytest.mark.parametrize("parsers", [(), ("m=deepseek",)])
def test_a_model_that_is_told_of_tools_by_a_message_may_call_in_its_own_form(
    said: str, parsers: tuple[str, ...]
) -> None:
    async def template(name: str) -> str:
        return TEMPLATE

    tensors = {
        name: TensorInfo(name, "BYTES", (1,)) for name in ("text_input", "chat_template_kwargs")
    }
    info = ModelInfo("m", "unary", False, None, tensors, {}, "0.1")
    tools = Tools.of({"tools": TOOLS, "messages": MESSAGES})
    formats = ToolFormats(template, parsers=parsers)
    new_reader = asyncio.run(formats.readers(info, tools, {"messages": MESSAGES}))
    assert new_reader is not None
    for cut in range(len(said)):
        reader = new_reader()
        parts = [*reader.read(f"So. {said[:cut]}"), *reader.read(said[cut:]), *reader.end()]
        found = [(part.kind, part.text) for part in parts if part.kind in ("name", "text")]
        is_read = not parsers or said is NATIVE
        assert (("name", "add") in found) == is_read
        assert "".join(text for kind, text in found if kind == "text").strip() == (
            "So." if is_read else f"So. {said}"
        )
