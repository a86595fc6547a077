"""``llmserve.toml``: the models of a repository, their sources, and how they are served."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any

from llmserve.builder.plan import DEFAULT_OUTPUT, BuildSpec
from llmserve.builder.source import is_demo
from llmserve.contract.serve_options import keys_of
from llmserve.contract.warm_prompt import WarmPrompt
from llmserve.errors import ConfigError
from llmserve.names import is_model_name, near
from llmserve.plugins.roles import MODEL_ROLES

SERVER_FILE = "llmserve.toml"


@dataclass(frozen=True)
class Key:
    """A key of the file: what its value is, and what it is for."""

    kind: str
    help: str
    opens: bool = False
    """Whether it opens what is closed: a file that merely lies in a folder may not set it."""


MODEL = {
    "source": Key("source", "A folder or a GGUF file, an id on the hub, or demo."),
    "plugin": Key("text", "The plugin to build with; by default the best one for the device."),
    **{role: Key("text", f"A {role} instead of the plugin's.") for role in MODEL_ROLES},
    "options": Key("options", "The options of the build, as llmserve plugins NAME lists them."),
    "input": Key(
        "text",
        "In place of source, for a model in the repository that others wrote: its input that takes "
        "the text, if it is not called text_input.",
    ),
    "output": Key("text", "With input: its output that has the answer."),
    "pin": Key("flag", "With on_demand: whether it is loaded from the start, and stays."),
    "warm": Key(
        "paths",
        "Files with system prompts that it reads whenever it is loaded, so that conversations that "
        "begin so need not wait for that.",
    ),
}
_TEXTS = ("input", "output")
_TENSOR = re.compile(r"[\w.:/-]{1,256}", re.ASCII)
_KINDS = {"file": "path", "folder": "path"}
"""What the file calls a kind of an option of ``serve``, if not the same."""


def _keys_of_serve(table: str) -> dict[str, Key]:
    return {
        key: Key(_KINDS.get(row.kind, row.kind), row.key_help, opens=row.opens)
        for key, row in keys_of(table).items()
    }


SERVE = _keys_of_serve("serve")
GATEWAY = _keys_of_serve("gateway")
TOP = {
    "repository": Key("path", "The folder of the built models; by default model_repository."),
    "models": Key("options", "The models by name."),
    "serve": Key("options", "How Triton is run."),
    "gateway": Key("options", "How the OpenAI API is run."),
}

_MOST_WARM = 8
"""How many warm prompts a model has: each takes its time whenever it is loaded."""
_LONGEST_WARM = 1 << 20
"""The bytes of one, which is more than models read at once."""

_TYPES: Mapping[str, tuple[tuple[type, ...], str, Mapping[str, Any]]] = {
    "text": ((str,), "a text", {"type": "string"}),
    "source": ((str,), "a text", {"type": "string"}),
    "path": ((str,), "a path", {"type": "string"}),
    "whole": ((int,), "a whole number", {"type": "integer", "minimum": 0}),
    "number": ((int, float), "a number", {"type": "number", "minimum": 0}),
    "flag": ((bool,), "true or false", {"type": "boolean"}),
    "texts": ((list,), "a list of texts", {"type": "array", "items": {"type": "string"}}),
    "paths": ((list,), "a list of paths", {"type": "array", "items": {"type": "string"}}),
    "options": ((dict,), "a table", {"type": "object"}),
}


@dataclass(frozen=True)
class ServerFile:
    """What a file says; its paths are from where it lies."""

    path: Path
    repository: Path
    models: Mapping[str, BuildSpec] = field(default_factory=dict)
    serve: Mapping[str, Any] = field(default_factory=dict)
    gateway: Mapping[str, Any] = field(default_factory=dict)
    pinned: tuple[str, ...] = ()
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The tensors for the text in and out of models that others wrote, by the models' names."""
    warm: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """The files with the prompts that models read once they are loaded."""

    def warm_prompts(self) -> dict[str, tuple[WarmPrompt, ...]]:
        """Read the prompts that models read once they are loaded; raise if one is not there."""
        return {
            name: tuple(_warm_prompt(self.path, f"models.{name}.warm", file) for file in files)
            for name, files in self.warm.items()
        }

    @classmethod
    def read(cls, path: Path, *, named: bool = True) -> ServerFile:
        """Read a file; raise if it has a key that means nothing, or a value of the wrong kind.

        One that was not ``named`` but lies in the folder may come from somebody else: it neither
        opens a server nor names a path outside its folder.
        """
        try:
            content = parse_toml(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not TOML: {error}", hint="see toml.io") from None
        except RecursionError:
            raise ConfigError(f"{path} is nested too deeply", hint="see toml.io") from None
        top = _checked(path, "", content, TOP)
        serve = _checked(path, "serve", top.get("serve", {}), SERVE)
        gateway = _checked(path, "gateway", top.get("gateway", {}), GATEWAY)
        if not named:
            for where, table, keys in (
                ("", top, TOP), ("serve.", serve, SERVE), ("gateway.", gateway, GATEWAY)
            ):  # fmt: skip
                _refuse_unnamed(path, where, table, keys)
        folder = path.absolute().parent
        repository = folder / top.get("repository", DEFAULT_OUTPUT)
        models = {
            name: _checked_model(path, name, entry) for name, entry in top.get("models", {}).items()
        }
        if not named:
            for name, model in models.items():
                _refuse_unnamed(path, f"models.{name}.", model, MODEL)
        return cls(
            path,
            _from_here(repository),
            {
                name: _spec(name, model, repository)
                for name, model in models.items()
                if "source" in model
            },
            serve,
            gateway,
            tuple(name for name, model in models.items() if model.get("pin")),
            {
                name: (model["input"], model["output"])
                for name, model in models.items()
                if "source" not in model
            },
            {
                name: tuple(map(Path, model["warm"]))
                for name, model in models.items()
                if model.get("warm")
            },
        )


def parse_toml(text: str) -> dict[str, Any]:
    # Python has a parser since 3.11.
    parser = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    content: dict[str, Any] = parser.loads(text)
    return content


def _checked_model(path: Path, name: str, entry: Any) -> dict[str, Any]:
    """Return the table of a model: one that is built, or one that others wrote."""
    where = f"models.{name}"
    if not is_model_name(name):
        raise ConfigError(
            f"{path}: {name!r} cannot be a model's name",
            hint="use letters, digits, '.', '_' and '-'",
        )
    if not isinstance(entry, dict):
        raise ConfigError(f"{path}: {where} is not a table", hint=f"begin it with [{where}]")
    model = _checked(path, where, entry, MODEL)
    if "source" not in model and not {*_TEXTS} & model.keys():
        raise ConfigError(f"{path}: {where} has no source", hint='add source = "…"')
    if len(model.get("warm", ())) > _MOST_WARM:
        raise ConfigError(f"{path}: {where}.warm names more than {_MOST_WARM} files")
    if "source" in model:
        _refuse(path, where, {*_TEXTS} & model.keys(), "a model with a source is built")
        return model
    _refuse(path, where, model.keys() - {*_TEXTS, "pin"}, "a model without a source is not built")
    for key in _TEXTS:
        if key not in model:
            raise ConfigError(f"{path}: {where} has no {key}", hint=f'add {key} = "…"')
        if not _TENSOR.fullmatch(model[key]):
            raise ConfigError(
                f"{path}: {where}.{key} cannot be {model[key]!r}", hint="name a tensor of the model"
            )
    return model


def _warm_prompt(path: Path, where: str, file: Path) -> WarmPrompt:
    try:
        # Of a pipe or a device there would be no end.
        if not file.is_file():
            raise ConfigError(f"{path}: {where}: there is no file {file}")
        with file.open("rb") as opened:
            content = opened.read(_LONGEST_WARM + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigError(f"{path}: {where}: {file} cannot be read: {why}") from None
    if len(content) > _LONGEST_WARM:
        what = f"{file} is over {_LONGEST_WARM >> 20} MB"
        raise ConfigError(f"{path}: {where}: {what}", hint="no model reads that much at once")
    # Editors end a file with a line break, which a prompt in a program seldom has.
    text = text.removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise ConfigError(f"{path}: {where}: {file} is empty")
    return WarmPrompt(file.name, text)


def _refuse(path: Path, where: str, keys: Collection[str], why: str) -> None:
    if keys:
        raise ConfigError(f"{path}: {where} has {', '.join(sorted(keys))}", hint=why)


def _spec(name: str, model: Mapping[str, Any], repository: Path) -> BuildSpec:
    parts: Any = {role: model.get(role) for role in MODEL_ROLES}
    return BuildSpec(
        model.get("plugin", ""), model["source"], name, _from_here(repository), **parts,
        options=model.get("options", {}),
    )  # fmt: skip


def _checked(path: Path, where: str, content: Any, keys: Mapping[str, Key]) -> dict[str, Any]:
    """Return a table whose keys and values mean something; paths are made absolute."""
    values = {}
    for name, value in content.items():
        full = f"{where}.{name}" if where else name
        if name not in keys:
            raise ConfigError(f"{path}: no key is called {full}", hint=near(name, keys))
        kind = keys[name].kind
        types, words, _ = _TYPES[kind]
        # In Python, True is a whole number.
        is_flag = isinstance(value, bool)
        fits = isinstance(value, types) and is_flag == (kind == "flag")
        if fits and kind in ("number", "whole"):
            # Compared this way round, nan does not fit.
            fits = 0 <= value < inf
            words += ", 0 or more"
        is_list = fits and kind in ("texts", "paths")
        if not fits or (is_list and not all(isinstance(text, str) for text in value)):
            raise ConfigError(f"{path}: {full} takes {words}, not {value!r}")
        values[name] = _located(path, value, kind)
    return values


def _refuse_unnamed(
    path: Path, where: str, table: Mapping[str, Any], keys: Mapping[str, Key]
) -> None:
    folder = path.absolute().parent.resolve()
    for name, value in table.items():
        if keys[name].opens and value:
            does = "opens the server" if value is True else "may run a command"
            what = f"{where}{name} {does}"
        elif any(not path.resolve().is_relative_to(folder) for path in _paths(keys[name], value)):
            what = f"{where}{name} is outside of the folder"
        else:
            continue
        raise ConfigError(
            f"{path}: {what}, and this file was only found here",
            hint=f"if you trust it, name it: --config {path}",
        )


def _paths(key: Key, value: Any) -> list[Path]:
    """Return the paths that the value of a key is."""
    if key.kind == "paths":
        return [*map(Path, value)]
    return [Path(value)] if key.kind == "path" else []


def _located(path: Path, value: Any, kind: str) -> Any:
    """Return a path from the file's folder; a source that is none, such as an id, stays."""
    if kind == "paths":
        return [_located(path, each, "path") for each in value]
    if kind not in ("path", "source"):
        return value
    try:
        found = path.absolute().parent / Path(value).expanduser()
        is_path = kind == "path" or value.startswith((".", "/", "~"))
        return str(found) if is_path or (not is_demo(value) and found.exists()) else value
    except (OSError, RuntimeError, ValueError):
        # No file can be called that, or ~NAME is no user.
        return value


def _from_here(path: Path) -> Path:
    """Return a path as short as in the commands that people type."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) and path != here else path


def value_words(key: Key) -> str:
    """Return what the value of a key is, in words."""
    return _TYPES[key.kind][1]


def schema() -> dict[str, Any]:
    """Return the JSON schema of the file, for editors."""
    model = _table(MODEL) | {"anyOf": [{"required": ["source"]}, {"required": [*_TEXTS]}]}
    properties = _table(TOP)["properties"]
    properties["models"] |= {"additionalProperties": model}
    properties["serve"] |= _table(SERVE)
    properties["gateway"] |= _table(GATEWAY)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": SERVER_FILE,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _table(keys: Mapping[str, Key]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            name: {**_TYPES[key.kind][2], "description": key.help} for name, key in keys.items()
        },
        "additionalProperties": False,
    }
