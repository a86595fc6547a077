"""``llmserve adapter``: adapters of built models, served or not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmserve.commands import Status, built_models, print_json, print_table
from llmserve.errors import UsageError
from llmserve_cli.interrupts import while_importing
from llmserve_cli.remove import store_of
from llmserve_cli.usage import Group

if TYPE_CHECKING:
    from llmserve.plugin import Model

_REPOSITORY = click.option(
    "--repository",
    type=click.Path(path_type=Path, file_okay=False),
    help="Model repository that has the model (default: model_repository, then LLMSERVE_HOME).",
)
_MODEL = click.argument("model", shell_complete=built_models)


@click.group(cls=Group)
def adapter() -> None:
    """Add, remove and list a model's adapters.

    They are LoRA adapters. A request names one with the option adapter, in the OpenAI API as the
    model MODEL:ADAPTER. A running server sees a change with the next request, and keeps what is
    under way.

    \b
    llmserve adapter add demo sql=./sql-adapter
    llmserve adapter list demo
    """


@adapter.command()
@_MODEL
@click.argument("named", metavar="NAME=FOLDER")
@_REPOSITORY
def add(model: str, named: str, repository: Path | None) -> None:
    """Add an adapter to a built model, or replace it.

    FOLDER has adapter_config.json and adapter_model.safetensors, as PEFT saves them, or is the id
    of a model on the Hugging Face hub that has them: nothing else of it is downloaded. They are
    copied, and checked against the model first.

    \b
    llmserve adapter add demo sql=./sql-adapter
    llmserve adapter add demo sql=OWNER/NAME
    """
    name, equals, folder = named.partition("=")
    if not equals or not folder:
        raise UsageError(f"{named!r} names no folder", hint="write NAME=FOLDER")
    built = _built(model, repository)
    with while_importing():
        from llmserve.plugin import add_adapter, locate_adapter
    with Status(f"adding {name}") as status:
        found = locate_adapter(folder, status.update)
        lora = add_adapter(built, name, found, status.update)
    click.echo(
        f"llmserve: {model} has the adapter {name}: rank {lora.rank}, {len(lora.shapes)} products",
        err=True,
    )


@adapter.command()
@_MODEL
@click.argument("name")
@_REPOSITORY
def remove(model: str, name: str, repository: Path | None) -> None:
    """Remove an adapter; requests that name it are refused from now on.

    \b
    llmserve adapter remove demo sql
    """
    from llmserve.plugin import remove_adapter

    remove_adapter(_built(model, repository), name)
    click.echo(f"llmserve: {model} has the adapter {name} no more", err=True)


@adapter.command("list")
@_MODEL
@_REPOSITORY
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_adapters(model: str, repository: Path | None, as_json: bool) -> None:
    """List the adapters of a model.

    \b
    llmserve adapter list demo
    """
    from llmserve.plugin import model_adapters
    from llmserve.runtime import LoraError

    found = model_adapters(_built(model, repository))
    rows = [
        {"name": name, "problem": str(lora)}
        if isinstance(lora, LoraError)
        else {"name": name, "rank": lora.rank, "products": len(lora.shapes), "base": lora.base}
        for name, lora in found.items()
    ]
    if as_json:
        print_json(rows)
    elif rows:
        columns = ("name", "rank", "products", "base", "problem")
        cells = [[str(row.get(column, "")) for column in columns] for row in rows]
        print_table([[column.upper() for column in columns], *cells])
    else:
        click.echo(f"llmserve: {model} has no adapters", err=True)


def _built(name: str, repository: Path | None) -> Model:
    from llmserve.plugin import Repository

    return Repository.open(store_of(name, repository).place(name)).model(name)
