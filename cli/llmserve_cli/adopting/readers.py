"""The table of readers: who knows a foreign format, and reads it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmserve.errors import ConfigError, UsageError
from llmserve_cli.adopting.adopted import Adopted
from llmserve_cli.adopting.command_lines import read_commands, recognises_command
from llmserve_cli.adopting.containers import (
    is_compose,
    is_kubernetes,
    read_compose,
    read_kubernetes,
)
from llmserve_cli.adopting.helm_values import is_values, read_values
from llmserve_cli.adopting.launch import free_ports
from llmserve_cli.adopting.ollama import is_modelfile, is_store, read_modelfile, read_store
from llmserve_cli.adopting.openvino_server import (
    is_graph,
    is_ovms_config,
    read_graph,
    read_ovms_config,
)
from llmserve_cli.adopting.ray_serve import is_ray_serve, read_ray_serve
from llmserve_cli.adopting.source_text import SourceText, read_source
from llmserve_cli.adopting.triton_repository import is_repository, read_repository
from llmserve_cli.adopting.yaml_nodes import Node, read_yaml


@dataclass(frozen=True)
class FolderReader:
    """A format that is a folder."""

    name: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path], Adopted]


@dataclass(frozen=True)
class TextReader:
    """A format that is one file."""

    name: str
    recognises: Callable[[SourceText], bool]
    read: Callable[[SourceText], Adopted]


@dataclass(frozen=True)
class YamlReader:
    """A format that is one file of YAML."""

    name: str
    recognises: Callable[[list[Node]], bool]
    read: Callable[[SourceText, list[Node]], Adopted]


FOLDERS = (
    FolderReader("a model repository of Triton", is_repository,
                 lambda folder: read_repository(folder, str(folder))),
    FolderReader("Ollama's store", is_store, read_store),
)  # fmt: skip
YAMLS = (
    YamlReader("Ray Serve LLM's YAML", is_ray_serve, read_ray_serve),
    YamlReader("manifests of Kubernetes and KServe", is_kubernetes, read_kubernetes),
    YamlReader("a compose file", is_compose, read_compose),
    YamlReader("values of a Helm chart", is_values, read_values),
)
TEXTS = (
    TextReader("a configuration of OpenVINO Model Server", is_ovms_config, read_ovms_config),
    TextReader("a graph of OpenVINO Model Server", is_graph, read_graph),
    TextReader("a Modelfile of Ollama", is_modelfile, read_modelfile),
    TextReader("a command line or a shell script", recognises_command, read_commands),
)
_IN_FOLDER = (
    "compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml", "Modelfile",
    "graph.pbtxt", "config.json",
)  # fmt: skip
"""Files that are read if a folder is named that has one of them."""
_COMMAND = "the command line"


def read_any(words: tuple[str, ...], here: Path) -> Adopted:
    """Read what the words name: a folder, a file, or a command line itself."""
    adopted = _read(words, here)
    if not (adopted.models or adopted.unmatched or adopted.kept or adopted.repository):
        raise ConfigError(
            f"{_named(words)} starts no server of models that is known", hint=_known()
        )
    adopted.leave_out_secrets()
    free_ports(adopted)
    return adopted


def _read(words: tuple[str, ...], here: Path) -> Adopted:
    path = _path(words)
    if path is None:
        return _read_command(words, here)
    if path.is_dir():
        for folder in FOLDERS:
            if folder.recognises(path):
                return folder.read(path)
        files = [path / name for name in _IN_FOLDER if (path / name).is_file()]
        if len(files) != 1:
            names = ", ".join(file.name for file in files)
            raise ConfigError(
                f"{path} has {names}" if files else f"{path} has nothing that is known",
                hint="name the file" if files else _known(),
            )
        path = files[0]
    return read_text(read_source(path))


def read_text(source: SourceText) -> Adopted:
    """Read a file by what is in it, whatever it is called."""
    for text in TEXTS[:-1]:
        if text.recognises(source):
            return text.read(source)
    if not source.name.endswith((".sh", ".bash", ".service", ".txt", ".md")):
        try:
            documents = read_yaml(source)
        except ConfigError:
            if source.name.endswith((".yaml", ".yml")):
                raise
            documents = []
        for each in YAMLS:
            if each.recognises(documents):
                return each.read(source, documents)
    last = TEXTS[-1]
    if last.recognises(source):
        return last.read(source)
    raise ConfigError(f"{source.name} is of no known format", hint=_known())


def _path(words: tuple[str, ...]) -> Path | None:
    if len(words) != 1:
        return None
    try:
        path = Path(words[0]).expanduser()
        if path.exists():
            return path
    except (OSError, ValueError, RuntimeError):
        # Too long for a path, or with a byte that none has: it may be a command.
        pass
    if " " in words[0].strip() or "\n" in words[0]:
        return None
    raise UsageError(f"there is no {words[0]}", hint=_known())


def _read_command(words: tuple[str, ...], here: Path) -> Adopted:

    text = words[0] if len(words) == 1 else shlex.join(words)
    source = SourceText(_COMMAND, text, here)
    if not recognises_command(source):
        raise UsageError(f"{_named(words)} starts no server that is known", hint=_known())
    return read_commands(source)


def _named(words: tuple[str, ...]) -> str:
    text = " ".join(" ".join(words).split())
    return text if len(text) < 80 else _COMMAND


def _known() -> str:
    names = [each.name for each in (*FOLDERS, *YAMLS, *TEXTS)]
    return f"name {', '.join(names[:-1])}, or {names[-1]}"
