"""``llmserve export``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from google.protobuf import text_format

from llmserve.commands import built_models, check_folder, printable
from llmserve.errors import ConfigError, OutputError, UsageError

if TYPE_CHECKING:
    from llmserve.plugin import Model, Repository

_MOUNTED = "/models"
"""Where NVIDIA's containers are usually given a repository."""
_OURS, _CONFIG = "llmserve.", "config.pbtxt"
_CLIENT = "client.py"


@click.command()
@click.argument("model", shell_complete=built_models)
@click.option(
    "--repository",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("model_repository"),
    show_default=True,
    help="The model's repository.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="The repository to write, for a Triton without llmserve.",
)
def export(model: str, repository: Path, out: Path) -> None:
    """Write a model for a Triton without llmserve.

    A model of the plugin vllm becomes one of vLLM's own backend, as NVIDIA's container has it; of
    a model with a graph for ONNX Runtime or libtorch, the graph is written. What is lost is said.
    Others run with llmserve's code, and are refused. A checkpoint that is copied is named as the
    container has it if the repository is mounted as /models.

    \b
    llmserve export writer --out plain
    """
    from llmserve.plugin import Repository

    found = Repository.open(repository)
    if model not in found.models:
        raise ConfigError(f"there is no model {model} in {repository}", hint="see llmserve list")
    subject = found.model(model)
    if subject.intact() is None:
        raise UsageError(f"{model} is not llmserve's", hint="copy its folder: it is plain already")
    way = next((way for way in _WAYS if way.fits(subject, found)), None)
    if way is None:
        recipe = subject.manifest.recipe if subject.manifest else ""
        raise ConfigError(
            f"{model} runs with llmserve's code: {recipe} cannot be exported",
            hint="build it with --plugin vllm and export that, or take the Dockerfile beside it",
        )
    check_folder(out)
    for name in way.names(subject, found):
        if (out / name).exists():
            raise OutputError(f"{out / name} is there already", hint="name another --out")
    try:
        for folder in way.write(subject, found, out):
            click.echo(folder)
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from None
    for line in way.lost:
        click.echo(printable(f"lost: {line}"), err=True)


@dataclass(frozen=True)
class _Way:
    """A form in which a model can be without llmserve."""

    fits: Callable[[Model, Repository], bool]
    names: Callable[[Model, Repository], list[str]]
    write: Callable[[Model, Repository, Path], list[Path]]
    lost: tuple[str, ...]


def _generator(model: Model) -> dict[str, Any]:
    components = model.manifest.components if model.manifest else {}
    return dict(components.get("generator") or {})


def _is_vllm(model: Model, _: Repository) -> bool:
    return _generator(model).get("name") == "vllm"


def _own_name(model: Model, _: Repository) -> list[str]:
    return [model.name]


def _write_vllm(model: Model, _: Repository, out: Path) -> list[Path]:
    """Write the arguments of vLLM's engine, and the checkpoint if the repository has it."""
    settings = dict(_generator(model).get("settings") or {})
    folder = out / model.name
    (folder / "1").mkdir(parents=True)
    arguments: dict[str, Any] = {}
    path = settings.get("path")
    if isinstance(path, str) and path:
        source = model.last_version / path
        if Path(path).is_absolute():
            arguments["model"] = path
        else:
            shutil.copytree(source, folder / "1" / "model")
            # Where the container has it: the backend does not look beside its file.
            arguments["model"] = f"{_MOUNTED}/{model.name}/1/model"
    else:
        arguments |= {"model": settings.get("id"), "revision": settings.get("revision")}
    if settings.get("dtype"):
        arguments["dtype"] = settings["dtype"]
    arguments |= dict(settings.get("engine_args") or {})
    if model.manifest is not None and model.manifest.trust_remote_code:
        arguments["trust_remote_code"] = True
    given = {key: value for key, value in arguments.items() if value not in (None, "")}
    text = json.dumps(given, indent=4)
    (folder / "1" / "model.json").write_text(f"{text}\n", encoding="utf-8")
    config = f'name: "{model.name}"\nbackend: "vllm"\ninstance_group [ {{ kind: KIND_MODEL }} ]\n'
    (folder / _CONFIG).write_text(config, encoding="utf-8")
    return [folder]


def _graphs(model: Model, repository: Repository) -> list[Model]:
    parts = [repository.model(name) for name in (*model.parts, model.name)]
    return [part for part in parts if part.runs_in_triton and part.name in repository.models]


def _has_graph(model: Model, repository: Repository) -> bool:
    return any(_is_graph(part) for part in _graphs(model, repository))


def _is_graph(part: Model) -> bool:
    config = part.config
    backend = "" if config is None else str(config.backend or config.platform.partition("_")[0])
    return backend in ("onnxruntime", "pytorch")


def _graph_names(model: Model, repository: Repository) -> list[str]:
    return [part.name for part in _graphs(model, repository) if _is_graph(part)]


def _write_graphs(model: Model, repository: Repository, out: Path) -> list[Path]:
    """Copy the models of Triton's own backends, with nothing of ours in their configurations."""
    written = []
    for part in _graphs(model, repository):
        if not _is_graph(part) or part.config is None:
            continue
        folder = out / part.name
        shutil.copytree(part.folder, folder, ignore=shutil.ignore_patterns(*part.about, _CLIENT))
        config = type(part.config)()
        config.CopyFrom(part.config)
        for key in [key for key in config.parameters if key.startswith(_OURS)]:
            del config.parameters[key]
        (folder / _CONFIG).write_text(text_format.MessageToString(config), encoding="utf-8")
        written.append(folder)
    return written


_WAYS = (
    _Way(
        _is_vllm, _own_name, _write_vllm,
        (
            "options of a request as inputs of their own: the backend takes sampling_parameters, "
            "a JSON object",
            "messages and tools: a client applies the chat template, or Triton's OpenAI frontend",
            "adapters, schemas and grammars, the finish reason, and the client",
            "the supervision of llmserve serve",
        ),
    ),
    _Way(
        _has_graph, _graph_names, _write_graphs,
        (
            "the text: clients send input_ids and get logits, and the tokenizer is theirs",
            "sampling, stop words and the end of an answer, which were llmserve's",
            "the ensemble, whose other parts run with llmserve's code",
        ),
    ),
)  # fmt: skip
