"""How a model is shown tools, and which parser reads its calls: by its chat template."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmserve.client import ModelInfo
from llmserve.client.tool_prompt import PLACE, needs_tools, takes_tools, with_tools_in_messages
from llmserve.client.tools import Tools
from llmserve.errors import UsageError
from llmserve.plugin import Registry, ToolParser, ToolReader
from llmserve_gateway.catalog import Catalog
from llmserve_gateway.errors import bad_request
from llmserve_gateway.tool_parsers import Arguments, Json

log = logging.getLogger("llmserve.gateway")

ReaderFactory = Callable[[], ToolReader]


def read_prompt(path: Path) -> str:
    """Read the text that explains tools to a model."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tool-prompt {path} cannot be read: {error}") from None
    if PLACE not in text:
        mend = f"write {PLACE} where the functions are to be listed"
        raise UsageError(f"--tool-prompt {path} does not show the tools", mend=mend)
    return text


class Readers:
    """The parsers of all installed plugins; ``names`` configures them as NAME or MODEL=NAME.

    ``prompt`` is the text that explains tools to a model whose chat template has no place for them,
    if it is not llmserve's own.
    """

    def __init__(self, names: Sequence[str], catalog: Catalog, prompt: str = "") -> None:
        registry = Registry.load()
        self._parsers = registry.all(ToolParser)
        pairs = (name.rpartition("=") for name in names)
        self._configured = {model: registry.get(ToolParser, name) for model, _, name in pairs}
        self._catalog = catalog
        self._prompt = prompt
        self._mentioned: set[str] = set()

    async def factory(self, info: ModelInfo, tools: Tools) -> ReaderFactory:
        """Return a factory of readers for answers, or refuse what the model does not support."""
        if tools.required:
            if info.made_by_llmserve and "json_schema" not in info.inputs:
                raise bad_request(
                    f"{info.name!r} can be asked to call a tool, but not forced to, because its "
                    'engine samples without constraints: set tool_choice to "auto"',
                    "tool_choice",
                )
            return partial(Arguments if tools.named else Json, tools.names)
        template = await self._catalog.chat_template(info.name)
        # A message that describes tools asks for the format of the parser that suits no template.
        visible = template if takes_tools(info, template) else None
        configured = self._configured.get(info.name) or self._configured.get("")
        parser = configured or max(self._parsers, key=lambda parser: parser.suits(visible or ""))
        return partial(parser.reader, tools.names)

    async def place_tools(
        self, info: ModelInfo, options: dict[str, Any], tools: Tools | None
    ) -> dict[str, Any]:
        """Return a request's options with its tools and calls where the model sees them."""
        if tools is None and not needs_tools(options.get("messages")):
            return options
        if takes_tools(info, await self._catalog.chat_template(info.name)):
            return options
        if tools and info.name not in self._mentioned:
            self._mentioned.add(info.name)
            log.warning(
                "the chat template of %r has no place for tools: a message describes them "
                "(--tool-prompt FILE sets its text)",
                info.name,
            )
        return with_tools_in_messages(options, tools, self._prompt)
