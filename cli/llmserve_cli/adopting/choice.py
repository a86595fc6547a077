"""Which plugin builds what was adopted, and which of its options that plugin has."""

from __future__ import annotations

import json
from collections.abc import Mapping

from llmserve.errors import OptionError, PluginError
from llmserve.plugin import Option, Recipe, Registry, known_options
from llmserve_cli.adopting.adopted import Adopted, AdoptedModel, Origin, Value
from llmserve_cli.adopting.rows import Row
from llmserve_cli.adopting.vllm_options import VLLM

_ENGINE_ARGS = "engine_args"
_SAYS: Mapping[str, Row] = {row.key: row for row in VLLM if row.goal == "option"}


def choose_plugins(
    adopted: Adopted, registry: Registry, *, plugin: str | None, source: str | None
) -> None:
    """Give each model a plugin and options that it has; what is left is told.

    Without ``plugin``, that is the one which the source itself means, or the best for this machine.
    """
    for model in adopted.models:
        if source is not None:
            model.source = Value(source, Origin("--model", 0, source))
        if plugin is not None:
            model.plugin = Value(plugin, Origin("--plugin", 0, plugin))
        elif model.plugin is None:
            best, reason = registry.recipe_for(_device(model))
            model.plugin = Value(best.name, Origin("this machine", 0, reason))
        _choose_options(adopted, model, registry)


def _device(model: AdoptedModel) -> str:
    device = model.options.get("device")
    return "auto" if device is None else str(device.value)


def _choose_options(adopted: Adopted, model: AdoptedModel, registry: Registry) -> None:
    plugin = str(model.plugin.value) if model.plugin else ""
    try:
        known = known_options(registry.get(Recipe, plugin), registry)
    except PluginError as error:
        place = model.plugin.origin if model.plugin else model.source.origin
        adopted.miss(place, f"{error.problem}: the options are not checked")
        model.engine_args.clear()
        return
    options = {each.name: each for each in known}
    asked, model.options = model.options, {}
    for name, value in asked.items():
        if (option := options.get(name)) is None:
            adopted.miss(value.origin, _instead(name, plugin, registry))
            continue
        try:
            model.options[name] = Value(_parsed(option, value.value), value.origin)
        except OptionError as error:
            adopted.miss(value.origin, f"{error}")
    if model.engine_args:
        _add_engine_args(adopted, model, options, plugin, registry)


def _add_engine_args(
    adopted: Adopted,
    model: AdoptedModel,
    options: Mapping[str, Option],
    plugin: str,
    registry: Registry,
) -> None:
    if _ENGINE_ARGS in options:
        values = {name: value.value for name, value in model.engine_args.items()}
        first = next(iter(model.engine_args.values())).origin
        texts = ", ".join(value.origin.text for value in model.engine_args.values())
        origin = Origin(first.file, first.line, texts)
        model.options[_ENGINE_ARGS] = Value(json.dumps(values, ensure_ascii=False), origin)
    else:
        for value in model.engine_args.values():
            adopted.miss(value.origin, _instead(_ENGINE_ARGS, plugin, registry))
    model.engine_args.clear()


def _parsed(option: Option, value: object) -> object:
    is_text = isinstance(value, str) and not isinstance(option.default, str)
    return option.parse(str(value)) if is_text else option.check(value)


def _instead(name: str, plugin: str, registry: Registry) -> str:
    """Say what a plugin without an option does, and which one has it."""
    row = _SAYS.get(name)
    kind = registry.get(Recipe, plugin).formatter
    others = [
        recipe.name
        for recipe in registry.all(Recipe)
        if recipe.formatter == kind
        and any(option.name == name for option in known_options(recipe, registry))
    ]
    words = f"{plugin} has no {name}"
    if row is not None and row.says:
        words += f": {row.says}"
    return f"{words}; --plugin {others[0]} has it" if others else words
