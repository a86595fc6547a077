"""The choice of a tool call parser for a model: by its chat template, or by configuration."""

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

ReaderFactory = Callable[[], ToolReader]


class Readers:
    """The parsers of all installed plugins; ``names`` configures them as NAME or MODEL=NAME."""

    def __init__(self, names: Sequence[str], catalog: Catalog) -> None:
        registry = Registry.load()
        self._parsers = registry.all(ToolParser)
        pairs = (name.rpartition("=") for name in names)
        self._configured = {model: registry.get(ToolParser, name) for model, _, name in pairs}
        self._catalog = catalog

    async def factory(self, info: ModelInfo, tools: Tools) -> ReaderFactory:
        """Return a factory of readers for answers, or refuse what the model does not support."""
        if info.made_by_llmserve and "chat_template_kwargs" not in info.inputs:
            raise bad_request(f"the tokenizer of {info.name!r} does not support tools", "tools")
        if tools.required:
            if info.made_by_llmserve and "json_schema" not in info.inputs:
                raise bad_request(
                    f"{info.name!r} cannot be forced to call a tool, because its engine samples "
                    "without constraints: leave out tool_choice",
                    "tool_choice",
                )
            return partial(Arguments if tools.named else Json, tools.names)
        template = await self._catalog.chat_template(info.name)
        if template is not None and "tools" not in template:
            raise bad_request(
                f"the chat template of {info.name!r} does not support tools: set tool_choice to "
                "required, or to one of the tools",
                "tools",
            )
        configured = self._configured.get(info.name) or self._configured.get("")
        parser = configured or max(self._parsers, key=lambda parser: parser.suits(template or ""))
        return partial(parser.reader, tools.names)
