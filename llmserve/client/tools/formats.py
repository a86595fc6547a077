"""How a model is shown tools, and which parser reads its calls: by its chat template."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from llmserve.client.model import ModelInfo
from llmserve.client.tools.parsers import Arguments, Json
from llmserve.client.tools.parts import NewReader
from llmserve.client.tools.prompt import needs_tools, with_tools_in_messages
from llmserve.client.tools.request import Tools, ToolsError
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import ToolParser


class ToolFormats:
    """The formats of tools and calls; ``template`` returns a model's chat template, if known.

    ``parsers`` replaces the parser that suits the template: NAME for all models, or MODEL=NAME.
    ``prompt`` is the text that explains tools to a model whose chat template has no place for them,
    if it is not llmserve's own; ``on_message`` is called with the model's name when it is used.
    """

    def __init__(
        self,
        template: Callable[[str], Awaitable[str | None]],
        *,
        parsers: Sequence[str] = (),
        prompt: str = "",
        on_message: Callable[[str], None] | None = None,
    ) -> None:
        registry = Registry.load()
        self._parsers = registry.all(ToolParser)
        pairs = (name.rpartition("=") for name in parsers)
        self._configured = {model: registry.get(ToolParser, name) for model, _, name in pairs}
        self._template = template
        self._prompt = prompt
        self._on_message = on_message

    async def place(
        self, info: ModelInfo, options: dict[str, Any], tools: Tools | None
    ) -> dict[str, Any]:
        """Return a request's options with its tools and calls where the model sees them."""
        if tools is None and not needs_tools(options.get("messages")):
            return options
        if takes_tools(info, await self._template_of(info)):
            return options
        if tools and self._on_message:
            self._on_message(info.name)
        return with_tools_in_messages(options, tools, self._prompt)

    async def readers(self, info: ModelInfo, tools: Tools) -> NewReader:
        """Return what makes a reader for each answer, or refuse what the model does not support."""
        if tools.required:
            if info.made_by_llmserve and "json_schema" not in info.inputs:
                raise ToolsError(
                    f"{info.name!r} can be asked to call a tool, but not forced to, because its "
                    'engine samples without constraints: set tool_choice to "auto"',
                    "tool_choice",
                )
            return partial(Arguments if tools.named else Json, tools.names)
        template = await self._template_of(info)
        # A message that describes tools asks for the format of the parser that suits no template.
        visible = template if takes_tools(info, template) else None
        configured = self._configured.get(info.name) or self._configured.get("")
        parser = configured or max(self._parsers, key=lambda parser: parser.suits(visible or ""))
        return partial(parser.reader, tools.names)

    async def _template_of(self, info: ModelInfo) -> str | None:
        return await self._template(info.name) if _KWARGS in info.inputs else None


_KWARGS = "chat_template_kwargs"


def takes_tools(info: ModelInfo, template: str | None) -> bool:
    """Return whether a model's chat template shows tools; an unknown template is trusted to."""
    return _KWARGS in info.inputs and (template is None or "tools" in template)
