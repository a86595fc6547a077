"""How a model is shown tools, and which parsers read its answers: by its chat template."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

from llmserve.client.model import ModelInfo
from llmserve.client.tools.json_calls import Arguments, FormedCalls, Json
from llmserve.client.tools.parts import NewReader, ToolNames, ToolReader
from llmserve.client.tools.prompt import needs_tools, with_tools_in_messages
from llmserve.client.tools.request import Tools, ToolsError
from llmserve.client.tools.thinking import Chain
from llmserve.contract.options import (
    CALL_MARKS,
    CALL_SCHEMA,
    FORMS,
    THINKING_BUDGET,
    THINKING_MARKS,
)
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import ToolParser

_KWARGS = "chat_template_kwargs"
_HELLO = "Hello."
# What is kept of prompts is bounded: their arguments come from clients, and may be megabytes.
_MAX_ENDS, _MAX_END = 256, 1024


class ToolFormats:
    """The formats of tools, calls and thinking.

    ``template`` returns a model's chat template, if known. ``prompt_of`` returns the prompt that a
    model makes of these options, None if it does not answer now: some end with the beginning of
    the model's thinking.
    ``parsers`` replaces the parser that suits the template: NAME for all models, or MODEL=NAME.
    ``prompt`` is the text that explains tools to a model whose chat template has no place for them,
    if it is not llmserve's own; ``on_message`` is called with the model's name when it is used.
    """

    def __init__(
        self,
        template: Callable[[str], Awaitable[str | None]],
        *,
        prompt_of: Callable[[str, Mapping[str, Any]], Awaitable[str | None]] | None = None,
        parsers: Sequence[str] = (),
        prompt: str = "",
        on_message: Callable[[str], None] | None = None,
    ) -> None:
        registry = Registry.load()
        self._parsers = registry.all(ToolParser)
        pairs = (name.rpartition("=") for name in parsers)
        self._configured = [(model, registry.get(ToolParser, name)) for model, _, name in pairs]
        self._template = template
        self._prompt_of = prompt_of
        self._prompt = prompt
        self._on_message = on_message
        self._ends: OrderedDict[bytes, str] = OrderedDict()

    def asked_by(
        self,
        template: Callable[[str], Awaitable[str | None]],
        prompt_of: Callable[[str, Mapping[str, Any]], Awaitable[str | None]],
    ) -> ToolFormats:
        """Return these formats, with other functions that ask for what is not known yet."""
        other = copy(self)
        other._template, other._prompt_of = template, prompt_of
        return other

    async def thinks(self, info: ModelInfo) -> bool:
        """Return whether a model's thinking is told from its answers."""
        return self._thinking_parser(info.name, await self._template_of(info)) is not None

    async def place(
        self, info: ModelInfo, options: dict[str, Any], tools: Tools | None
    ) -> dict[str, Any]:
        """Return a request's options with all that the model has to know of its answer's format."""
        options = await self._with_marks(info, options, tools)
        if tools is None and not needs_tools(options.get("messages")):
            return options
        if takes_tools(info, await self._template_of(info)):
            return options
        if tools and self._on_message:
            self._on_message(info.name)
        return with_tools_in_messages(options, tools, self._prompt)

    async def readers(
        self, info: ModelInfo, tools: Tools | None, options: Mapping[str, Any]
    ) -> NewReader | None:
        """Return what makes a reader for each answer, or refuse what the model does not support.

        None if the answer is text alone. ``options`` are those of the request.
        """
        if not options.get("messages"):
            return None
        template = await self._template_of(info)
        thinking = self._thinking_parser(info.name, template)
        calls = self._new_reader_of_calls(info, tools, template, options)
        if thinking is None:
            return calls
        begun = await self._begun(info, thinking, options.get(_KWARGS) or {})
        names = ToolNames.of(tools.allowed_functions if tools else ())
        free = tools is not None and not tools.required
        both = free and thinking is self._calls_parser(info, template)

        def new_reader() -> ToolReader:
            first = thinking.reader(names if both else frozenset())
            first.read(begun)
            return Chain(first, calls() if calls and not both else None)

        return new_reader

    def _new_reader_of_calls(
        self,
        info: ModelInfo,
        tools: Tools | None,
        template: str | None,
        options: Mapping[str, Any],
    ) -> NewReader | None:
        if tools is None:
            return None
        names = ToolNames.of(tools.allowed_functions)
        if tools.required:
            if info.made_by_llmserve and "json_schema" not in info.inputs:
                raise ToolsError(
                    f"{info.name!r} can be asked to call a tool, but not forced to, because its "
                    'engine samples without constraints: set tool_choice to "auto"',
                    "tool_choice",
                )
            return partial(Arguments if tools.named else Json, names)
        parser = self._calls_parser(info, template)
        if CALL_SCHEMA in options and not parser.json_calls:
            return partial(FormedCalls, parser.opens, names)
        reader, native = parser.reader, self._native_parser(info, template)
        return (
            partial(reader, names)
            if native is None
            else lambda: Chain(native.reader(names), reader(names))
        )

    def _calls_parser(self, info: ModelInfo, template: str | None) -> ToolParser:
        # A message that describes tools asks for the format of the parser that suits no template.
        visible = template if takes_tools(info, template) else None
        configured = next((p for p in self._configured_for(info.name) if p.calls), None)
        found = (parser for parser in self._parsers if parser.calls)
        return configured or max(found, key=lambda parser: parser.suits(visible or ""))

    def _native_parser(self, info: ModelInfo, template: str | None) -> ToolParser | None:
        """Return the parser of a model that is told to call in another form than its own.

        DeepSeek V3.1's template has the marks of calls, and no place for tools: it may use both.
        """
        if takes_tools(info, template) or self._has_configured(info.name):
            return None
        found = [parser for parser in self._parsers if parser.calls]
        best = max(found, key=lambda parser: parser.suits(template or ""))
        return None if best is self._calls_parser(info, template) else best

    def _has_configured(self, model: str) -> bool:
        return any(parser.calls for parser in self._configured_for(model))

    def _thinking_parser(self, model: str, template: str | None) -> ToolParser | None:
        """Return the parser of a model's thinking; None if its template has no sign of any."""
        for parser in self._configured_for(model):
            if parser.thinking:
                return parser
        found = [parser for parser in self._parsers if parser.thinking]
        best = max(found, key=lambda parser: parser.suits(template or ""), default=None)
        return best if best and best.suits(template or "") > 0 else None

    def _configured_for(self, model: str) -> Iterator[ToolParser]:
        """Yield the parsers that were named for a model, then those for all."""
        for name in (model, ""):
            yield from (parser for place, parser in reversed(self._configured) if place == name)

    async def _with_marks(
        self, info: ModelInfo, options: dict[str, Any], tools: Tools | None
    ) -> dict[str, Any]:
        """Add the marks with which the runtime keeps a constraint out of thinking and calls."""
        forms = [form.name for form in FORMS if options.get(form.name)]
        budget = options.get(THINKING_BUDGET)
        if not options.get("messages") or not (forms or budget is not None or tools):
            return options
        template = await self._template_of(info)
        added: dict[str, Any] = {}
        thinking = self._thinking_parser(info.name, template)
        if thinking and (forms or budget is not None):
            begin, end, *close = thinking.thinking
            added[THINKING_MARKS] = [end, *(close or [end]), *filter(None, [begin])]
        if tools and not tools.required:
            added |= self._marks_of_calls(info, tools, template, forms)
        return {**options, **added} if info.made_by_llmserve else options

    def _marks_of_calls(
        self, info: ModelInfo, tools: Tools, template: str | None, forms: Sequence[str]
    ) -> dict[str, Any]:
        parser = self._calls_parser(info, template)
        constrains = "json_schema" in info.inputs
        # One that finds the thinking as well reads calls in no other form than its own.
        formed = parser.opens and (parser.json_calls or not parser.thinking)
        if forms and not (formed and constrains and info.made_by_llmserve):
            raise ToolsError(
                f"tools cannot be combined with constrained answers ({forms[0]}) by {info.name!r}",
                hint="leave out one",
            )
        # A broken call would be content, and so an answer that is not in its form.
        if not forms and not (tools.strict and parser.json_calls and constrains):
            return {}
        return {CALL_MARKS: list(parser.opens), CALL_SCHEMA: tools.schema_of_call()}

    async def _begun(self, info: ModelInfo, parser: ToolParser, kwargs: Mapping[str, Any]) -> str:
        """Return what the prompt has of the answer already, from the first mark of thinking on."""
        begin, end, *_ = parser.thinking
        if self._prompt_of is None or not begin or _KWARGS not in info.inputs:
            return ""
        kwargs = {name: value for name, value in kwargs.items() if name != "tools"}
        asked = json.dumps([info.name, await self._template_of(info), kwargs], sort_keys=True)
        key = hashlib.sha256(asked.encode()).digest()
        if key not in self._ends:
            messages = [{"role": "user", "content": _HELLO}]
            options = {"messages": messages, **({_KWARGS: kwargs} if kwargs else {})}
            if (prompt := await self._prompt_of(info.name, options)) is None:
                return ""
            _, found, rest = prompt.rpartition(_HELLO)
            self._ends[key] = rest[-_MAX_END:] if found else ""
            if len(self._ends) > _MAX_ENDS:
                self._ends.popitem(last=False)
        prompt_end = self._ends[key]
        at = min((i for mark in (begin, end) if (i := prompt_end.find(mark)) >= 0), default=None)
        return "" if at is None else prompt_end[at:]

    async def _template_of(self, info: ModelInfo) -> str | None:
        return await self._template(info.name) if _KWARGS in info.inputs else None


def takes_tools(info: ModelInfo, template: str | None) -> bool:
    """Return whether a model's chat template shows tools; an unknown template is trusted to."""
    return _KWARGS in info.inputs and (template is None or "tools" in template)
