"""``llmserve plugin``: what an author of plugins needs."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import click

from llmserve.scaffold import KINDS, new_package
from llmserve_cli.usage import Group


@click.group(cls=Group)
def plugin() -> None:
    """Write a plugin of your own.

    `llmserve plugins` lists those that are installed.

    \b
    llmserve plugin new acme-words --role tokenizer
    """


@plugin.command()
@click.argument("name")
@click.option(
    "--role",
    required=True,
    type=click.Choice(KINDS),
    help="What it provides; a recipe that uses it is written too.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder to put the package in, by default this one.",
)
def new(name: str, role: str, output: Path) -> None:
    """Write a package that works as it stands: code, tests and documentation.

    Its folder is printed: llmserve-NAME. Nothing is overwritten.

    \b
    llmserve plugin new acme-words --role tokenizer
    llmserve plugin new acme-queue --role batching --output ~/src
    """
    folder = new_package(name, role, output)
    click.echo(folder)
    here = quote(str(folder))
    with_tests = quote(f"{folder}[test]")
    lines = [
        f"install it:        pip install -e {with_tests}",
        f"run its tests:     (cd {here} && pytest)",
        f"run it:            llmserve {name} --help"
        if role == "command"
        else f"build with it:     llmserve build --plugin {name} --model demo",
        f"what to change:    {quote(str(folder / 'README.md'))}",
    ]
    click.echo("\n".join(lines), err=True)
