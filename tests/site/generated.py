"""The pages of the site that are made from the commands, the registry and the other sources."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import click

from llmserve import errors
from llmserve.builder.plan import known_options
from llmserve.contract import tensors
from llmserve.contract.tensors import Tensor
from llmserve.plugins.api import MODULES
from llmserve.plugins.options import Option
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import MODEL_ROLES, Component, Recipe
from llmserve.runtime import metrics as model_metrics
from llmserve_certify.commands import FAILED as CERTIFY_FAILED
from llmserve_cli.group import cli
from llmserve_cli.interrupts import EXIT_CODE
from llmserve_cli.main import BROKEN_PIPE
from llmserve_gateway.endpoints import ENDPOINTS
from llmserve_gateway.metrics import Metrics

API_FILE = Path(errors.__file__).parent / "api.txt"
Row = tuple[str, ...]


def table(titles: Row, rows: Iterable[Row]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def all_commands() -> Iterator[tuple[str, click.Command]]:
    yield from _commands("llmserve", cli, None)


def _commands(
    path: str, group: click.Group, parent: click.Context | None
) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group, info_name=path, parent=parent)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from _commands(f"{path} {name}", command, None)


def commands_page() -> str:
    pages = [f"## {path}\n\n{_command(path, command)}" for path, command in all_commands()]
    return "# Commands\n\nThe same as `llmserve COMMAND --help`.\n\n" + "\n".join(pages)


def _command(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path)
    usage = f"    {path} {' '.join(command.collect_usage_pieces(context))}\n\n"
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    rows = [(f"`{names}`", text) for names, text in filter(None, records)]
    text = f"{_prose(command.help or command.short_help or '')}\n\n"
    return usage + text + (table(("option", "use"), _plain(rows)) if rows else "")


def _prose(text: str) -> str:
    """Paragraphs of a command's help; those that click keeps as they are, as code."""
    paragraphs = re.split(r"\n\s*\n", re.sub(r"(?m)^[ ]*\f.*", "", text).strip())
    return "\n\n".join(
        "\n".join(f"    {line.strip()}" for line in part.strip().removeprefix("\b\n").splitlines())
        if part.strip().startswith("\b")
        else _escaped(" ".join(part.split()))
        for part in paragraphs
    )


def _escaped(text: str) -> str:
    return re.sub(r"([<>\[\]*_])", r"\\\1", text)


def _plain(rows: list[tuple[str, str]]) -> list[Row]:
    return [(name, _escaped(text)) for name, text in rows]


def plugin_options_page() -> str:
    registry = Registry.load()
    recipes = registry.all(Recipe)
    text = "# Options of plugins\n\nGiven to `llmserve build --plugin NAME` as `--set KEY=VALUE`.\n"
    text += "".join(_recipe(recipe, registry) for recipe in recipes)
    return text + "".join(_part(role, part) for role, part in other_parts(registry))


def other_parts(registry: Registry) -> Iterator[tuple[str, Component]]:
    """Those with options that no recipe names: ``--batching NAME`` and so on choose them."""
    for role, kind in MODEL_ROLES.items():
        named = {getattr(recipe, role) for recipe in registry.all(Recipe)}
        parts = (part for part in registry.all(kind) if part.name not in named)
        yield from ((role, part) for part in parts if part.options)


def _part(role: str, part: Component) -> str:
    chosen = f"It is chosen with `--{role} {part.name}`."
    return f"\n## {part.name}\n\n{_escaped(part.summary)}. {chosen}\n\n" + _options(part.options)


def _options(options: Iterable[Option]) -> str:
    rows = [(f"`{o.name}`", f"`{_default(o.default)}`", _escaped(o.help)) for o in options]
    return table(("option", "default", "use"), rows)


def _recipe(recipe: Recipe, registry: Registry) -> str:
    parts = ", ".join(f"{role} `{getattr(recipe, role)}`" for role in MODEL_ROLES)
    head = f"\n## {recipe.name}\n\n{_escaped(recipe.summary)}. It combines {parts}.\n\n"
    return head + _options(known_options(recipe, registry))


def _default(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def all_tensors() -> Mapping[str, Tensor]:
    """Those that stand in the contract under a name of their own, or in a tuple."""
    found = [
        value if isinstance(value, tuple) else (value,)
        for value in vars(tensors).values()
        if isinstance(value, (Tensor, tuple))
    ]
    return {item.name: item for item in chain(*found) if isinstance(item, Tensor)}


def tensors_page() -> str:
    rows = [
        (f"`{t.name}`", f"`{t.data_type}`", f"`{list(t.dims)}`", "no" if t.optional else "yes")
        for t in all_tensors().values()
    ]
    return (
        "# Tensors\n\nInputs are `text_input` or `messages`, the rest are outputs. "
        "[The options of a request](options.md) are optional inputs of their names.\n\n"
        + table(("tensor", "type", "dims, without the batch", "always there"), rows)
    )


def http_page() -> str:
    rows = [(f"`{row.method} {row.name}`", row.summary) for row in ENDPOINTS]
    return (
        "# HTTP API\n\nWhat the [gateway](../plugins/gateway.md) answers; [the fields of "
        "requests](requests.md) have a page of their own. It serves both itself, for the models "
        "that it has, at `/openapi.json`.\n\n" + table(("endpoint", ""), rows)
    )


def gateway_metrics() -> list[Row]:
    families = Metrics().registry.collect()
    return [(f"`{f.name}`", f.type, f.documentation) for f in families]


def triton_metrics() -> list[Row]:
    gauges = [(f"`{name}`", "gauge", text) for name, (_, text) in model_metrics._GAUGES.items()]
    counters = {
        **model_metrics._COUNTERS,
        **{n: t for n, (_, t) in model_metrics._OF_ENGINE.items()},
    }
    return [*gauges, *((f"`{name}`", "counter", text) for name, text in counters.items())]


def metrics_page() -> str:
    titles = ("metric", "kind", "what it counts")
    return (
        "# Metrics\n\n## Of the gateway\n\n"
        "At `/metrics`, with the ending `_total` for counters.\n\n"
        + table(titles, gateway_metrics())
        + "## Of a model that runs step by step\n\nIn Triton's `/metrics`, beside its own.\n\n"
        + table(titles, triton_metrics())
    )


EXIT_CODES = {
    0: "success",
    1: "a failure of another kind, as of the server or of the machine",
    2: "wrong usage: an argument or an option",
    3: "an invalid repository, configuration, model or plugin",
    4: "no server answers",
    5: "the model is not ready: it is loading, it failed, or the server does not have it",
    6: "the time limit has passed",
    7: "the server refused the request, or its model failed",
    CERTIFY_FAILED: "`llmserve certify` found faults, or did not get to its end",
    EXIT_CODE: "interrupted, as by Ctrl-C",
    BROKEN_PIPE: "the reader of the output has closed the pipe",
}


def exit_codes_page() -> str:
    kinds: dict[int, list[str]] = {code: [] for code in EXIT_CODES}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.LLMServeError):
            kinds[kind.exit_code].append(f"`{kind.__name__}`")
    rows = [(str(code), text, ", ".join(kinds[code])) for code, text in EXIT_CODES.items()]
    return (
        "# Exit codes\n\nAnswers go to standard output, everything else to standard error.\n\n"
        + table(("code", "meaning", "errors in Python"), rows)
    )


def python_names() -> Mapping[str, list[str]]:
    """The lines of ``llmserve/api.txt`` by module."""
    modules: dict[str, list[str]] = {}
    for line in API_FILE.read_text(encoding="utf-8").splitlines()[1:]:
        module = max((m for m in MODULES if line.startswith(f"{m}.")), key=len)
        modules.setdefault(module, []).append(line)
    return modules


def python_page() -> str:
    rows = [
        (f"[`{module}`](python/{module}.md)", _first_sentence(import_module(module)))
        for module in python_names()
    ]
    return "# Python\n\nWhat programs and plugins may use; the rest may change.\n\n" + table(
        ("module", "what it holds"), rows
    )


def python_module_page(module: str) -> str:
    """A page of which mkdocstrings makes signatures and docstrings, where a name is defined."""
    parts = [_public(module, line) for line in python_names()[module]]
    return f"# {module}\n\n{_first_sentence(import_module(module))}\n\n" + "\n".join(parts)


def _public(module: str, line: str) -> str:
    name = re.split(r"[^\w.]", line.removeprefix(f"{module}."))[0]
    found = getattr(import_module(module), name)
    home, defined = getattr(found, "__module__", ""), getattr(found, "__qualname__", "")
    if home.startswith("llmserve") and (inspect.isclass(found) or inspect.isfunction(found)):
        options = f"    options:\n      heading: {module}.{name}\n      toc_label: {name}\n"
        return f"::: {home}.{defined}\n{options}"
    return f"## {module}.{name}\n\n    {line}\n"


def _first_sentence(found: object) -> str:
    text = (inspect.getdoc(found) or "").split("\n\n")[0]
    return _escaped(" ".join(text.split()).rstrip(":"))


def as_markdown(docstring: str) -> str:
    text = re.sub(r":(?:class|func|meth|mod|data|attr):`~?", "`", docstring)
    text = re.sub(r"(?m)::$", ":", text)
    # A session of Python is the rest of its paragraph.
    return re.sub(r"(?ms)^>>> .*?(?=\n\n|\Z)", r"```pycon\n\g<0>\n```", text)


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/commands.md": commands_page,
    "reference/plugin-options.md": plugin_options_page,
    "reference/tensors.md": tensors_page,
    "reference/http.md": http_page,
    "reference/metrics.md": metrics_page,
    "reference/exit-codes.md": exit_codes_page,
    "reference/python.md": python_page,
    **{f"reference/python/{m}.md": partial(python_module_page, m) for m in python_names()},
}
