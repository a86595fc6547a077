"""Reading the tools of a request: what may be called, and what has to be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmserve.client.tools import MOST, Tools
from llmserve.errors import OptionError
from llmserve_gateway.errors import bad_request
from llmserve_gateway.fields import Fields

_NAME = re.compile(r"[\w.\-]{1,64}")


def read_tools(fields: Fields) -> Tools | None:
    """Take OpenAI's fields of tools, as chats have them; None where nothing may be called."""
    fields.refuse("it is an older name: use tools and tool_choice", "functions", "function_call")
    told = fields.take("tools", type="array", items={"type": "object"})
    functions = []
    for at, tool in enumerate(told if isinstance(told, list) else []):
        _refuse_other(tool, f"tools[{at}]")
        # Responses have them a level less deep than chats.
        function = tool.get("function", tool)
        functions.append({name: part for name, part in function.items() if name != "type"})
    choice, named = fields.take("tool_choice"), None
    if isinstance(choice, dict):
        _refuse_other(choice, "tool_choice", "tool_choice")
        named = choice.get("function", choice).get("name")
        choice = "required"
    parallel = fields.take("parallel_tool_calls", type="boolean")
    if parallel not in (None, True, False):
        raise bad_request("parallel_tool_calls has to be true or false", "parallel_tool_calls")
    return make_tools(told, functions, choice, named, parallel=parallel is not False)


def make_tools(
    told: Any, functions: list[Any], choice: Any, named: Any, *, parallel: bool
) -> Tools | None:
    """Check what may be called and what has to be; every dialect writes it in its own way."""
    if told is not None and not isinstance(told, list):
        raise bad_request("tools has to be a list", "tools")
    choice = choice or ("auto" if functions else "none")
    if choice not in ("none", "auto", "required"):
        what = "tool_choice has to be none, auto, required, or name a function"
        raise bad_request(what, "tool_choice")
    if len(functions) > MOST:
        raise bad_request(f"at most {MOST} tools can be offered", "tools")
    names = [_function(one, f"tools[{at}]") for at, one in enumerate(functions)]
    if len(set(names)) < len(names):
        raise bad_request("tools has two functions of the same name", "tools")
    if choice == "required" and not functions:
        raise bad_request("tool_choice wants a call, and there are no tools", "tool_choice")
    if choice == "required" and named is not None and named not in names:
        raise bad_request(f"tool_choice names {named!r:.80}, which is no tool", "tool_choice")
    if choice == "none" or not functions:
        return None
    return Tools(tuple(functions), choice, named, parallel)


def with_tools(tools: Tools | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request with its tools, for the model to be asked with."""
    try:
        return tools.options(options) if tools else dict(options)
    except OptionError as error:
        raise bad_request(str(error), "tools") from None


def _function(one: Any, where: str) -> str:
    name = one.get("name") if isinstance(one, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(
            f"{where} has to have a name of letters, digits, '_', '-' and '.', at most 64", "tools"
        )
    if not isinstance(one.get("parameters") or {}, dict):
        raise bad_request(f"{where}: the parameters of {name!r} are no schema", "tools")
    return name


def _refuse_other(tool: Any, where: str, param: str = "tools") -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function" or not isinstance(tool.get("function", {}), dict):
        raise bad_request(f"{where} has to be a function, not {str(kind)[:40]!r}", param)
