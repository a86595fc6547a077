"""Who reads the calls of which model: by its chat template, or by what the gateway was told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llmserve.client.model import ModelInfo
from llmserve.client.tools import Tools
from llmserve.plugin import ToolParser, ToolReader
from llmserve.registry import Registry
from llmserve_gateway.catalog import Catalog
from llmserve_gateway.errors import bad_request
from llmserve_gateway.tool_parsers import Arguments, Json

NewReader = Callable[[], ToolReader]


class Readers:
    """The parsers of all installed plugins; ``told`` has a name, or ``MODEL=NAME``, for some."""

    def __init__(self, told: Sequence[str], catalog: Catalog) -> None:
        registry = Registry.load()
        self._parsers = registry.all(ToolParser)
        pairs = (one.rpartition("=") for one in told)
        self._told = {model: registry.get(ToolParser, name) for model, _, name in pairs}
        self._catalog = catalog

    async def of(self, info: ModelInfo, tools: Tools) -> NewReader:
        """Return what makes a reader for one answer, or refuse what the model cannot do."""
        if info.made_by_llmserve and "chat_template_kwargs" not in info.inputs:
            raise bad_request(f"the tokenizer of {info.name!r} cannot show it any tools", "tools")
        if tools.held:
            if info.made_by_llmserve and "json_schema" not in info.inputs:
                raise bad_request(
                    f"{info.name!r} cannot be held to a call, for its engine chooses its tokens "
                    "alone: leave out tool_choice",
                    "tool_choice",
                )
            return partial(Arguments if tools.named else Json, tools.names)
        template = await self._catalog.chat_template(info.name)
        if template is not None and "tools" not in template:
            raise bad_request(
                f"the chat template of {info.name!r} has no place for tools: name one in "
                "tool_choice, or say required there, and the answer is held to a call",
                "tools",
            )
        found = self._told.get(info.name) or self._told.get("")
        parser = found or max(self._parsers, key=lambda one: one.suits(template or ""))
        return partial(parser.reader, tools.names)
