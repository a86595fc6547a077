"""``llmserve list``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmserve.commands import built_models, print_json, print_table, printable
from llmserve.errors import ConfigError
from llmserve.plugin import near
from llmserve.runtime.contract import task_of
from llmserve.server import REPOSITORY_FOLDER, Running, find_servers
from llmserve_cli.terminal import size_in_words

if TYPE_CHECKING:
    from llmserve.plugin import Model, Repository, StoredModel

NONE = "llmserve run MODEL builds one"


@dataclass(frozen=True)
class Entry:
    """A built model as the list shows it."""

    name: str
    repository: str
    plugin: str
    size: int
    built: float
    served: str
    """The address of the server that has it; empty if none has."""
    source: str
    problem: str = ""
    """What is wrong with it; empty if nothing is known."""

    def cells(self) -> list[str]:
        built = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.built))
        return [self.name, self.plugin, size_in_words(self.size), built, self.served, self.source]


@click.command("list")
@click.argument("model", required=False, shell_complete=built_models)
@click.option(
    "--repository",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="List the models of this repository instead.",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def list_models(model: str | None, repository: Path | None, as_json: bool) -> None:
    """List the models that are built.

    With a name, only those of that name, with what they were built as. They are those that
    `llmserve run` and `llmserve serve MODEL` keep in LLMSERVE_HOME, and those of model_repository
    in the current folder.

    \b
    llmserve list
    llmserve list demo
    llmserve remove demo
    """
    from llmserve.plugin import Repository, Store

    servers = find_servers()
    store = Store()
    groups: dict[str, list[Entry]] = {}
    if repository is None:
        kept = store.models()
        groups[str(store.models_folder)] = [_entry_of_kept(each, servers) for each in kept]
    folder = repository or REPOSITORY_FOLDER
    groups[str(folder)] = list(_entries(Repository.open(folder), servers))
    if model is not None:
        names = {entry.name for group in groups.values() for entry in group}
        groups = {
            place: [entry for entry in group if entry.name == model]
            for place, group in groups.items()
        }
        if not any(groups.values()):
            raise ConfigError(
                f"no model {model!r} is built", hint=near(model, names) if names else NONE
            )
    entries = [entry for group in groups.values() for entry in group]
    if as_json:
        print_json([asdict(entry) for entry in entries])
        return
    for place, group in groups.items():
        if group:
            click.echo(place)
            print_table([["NAME", "PLUGIN", "SIZE", "BUILT", "SERVED AT", "SOURCE"]]
                        + [entry.cells() for entry in group])  # fmt: skip
        for entry in group if model is not None else ():
            for word, text in _details(Repository.open(Path(entry.repository)).model(entry.name)):
                click.echo(f"  {word:<10}  {printable(text)}")
    for entry in entries:
        if entry.problem:
            line = f"{entry.name}: {entry.problem}: llmserve remove {entry.name} deletes it"
            click.echo(printable(line), err=True)
    if not entries:
        click.echo(f"no model is built: {NONE}", err=True)


def _details(model: Model) -> Iterator[tuple[str, str]]:
    """Yield what a model is, as far as its manifest says it."""
    yield "folder", str(model.folder)
    if (manifest := model.manifest) is None:
        return
    yield "model", task_of(manifest.task).does
    if size := manifest.size:
        yield "weights", f"{size['parameters'] / 1e6:.4g} million, {size['dtype']}"
        yield from [("context", f"{size['context']} tokens")] if size["context"] else ()
    if model.fingerprint:
        yield "passport", model.fingerprint
    components = sorted(manifest.components.items())
    yield "components", ", ".join(f"{role} {part['name']}" for role, part in components)
    # As they are given to --set.
    values = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in sorted(manifest.options.items())
        if value != ""
    }
    yield "options", " ".join(f"{name}={value}" for name, value in values.items())
    yield "llmserve", manifest.llmserve


def _entries(repository: Repository, servers: Sequence[Running]) -> Iterator[Entry]:
    # A step of an ensemble that somebody wrote is a model of its own.
    parts = {part for model in repository for part in model.built_with}
    for model in repository:
        if (model.folder / "config.pbtxt").is_file() and model.name not in parts:
            yield _entry(repository, model, servers, _source(model), _built(model))


def _entry_of_kept(kept: StoredModel, servers: Sequence[Running]) -> Entry:
    from llmserve.plugin import Repository

    source = kept.record.model if kept.record else _source(kept.model)
    built = kept.record.built if kept.record else _built(kept.model)
    entry = _entry(Repository.open(kept.repository), kept.model, servers, source, built)
    return entry if entry.served else replace(entry, problem=_problem(kept))


def _problem(kept: StoredModel) -> str:
    if kept.record is None or kept.model.missing():
        return "its build was not finished"
    return f"it could not be served ({kept.record.failed})" if kept.record.failed else ""


def _entry(
    repository: Repository, model: Model, servers: Sequence[Running], source: str, built: float
) -> Entry:
    serving = [server for server in servers if server.serves(model.name, repository.path)]
    return Entry(
        model.name,
        str(repository.path),
        model.manifest.recipe if model.manifest else "",
        folder_size([repository.path / name for name in repository.with_parts([model.name])]),
        built,
        serving[0].url if serving else "",
        source,
    )


def folder_size(folders: Sequence[Path]) -> int:
    return sum(path.lstat().st_size for folder in folders for path in folder.rglob("*"))


def _source(model: Model) -> str:
    """Return what the manifest says of the source: an id, or the name of a folder or a file."""
    source = model.manifest.source if model.manifest else {}
    return str(next((source[key] for key in ("id", "folder", "file", "name") if key in source), "")
               or source.get("kind", ""))  # fmt: skip


def _built(model: Model) -> float:
    return (model.folder / "config.pbtxt").stat().st_mtime
