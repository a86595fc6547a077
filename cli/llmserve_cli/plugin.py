"""``llmserve plugin``: tools for plugin authors."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import click

from llmserve.plugin import install_command, scaffold
from llmserve_cli.usage import Group


@click.group(cls=Group)
def plugin() -> None:
    """Create your own plugin.

    `llmserve plugins` lists installed plugins.

    \b
    llmserve plugin new acme-words --role tokenizer
    """


@plugin.command()
@click.argument("name")
@click.option(
    "--role",
    required=True,
    type=click.Choice(scaffold.KINDS),
    help="Role of the new component; a recipe that uses it is also created.",
)
@click.option(
    "--mode",
    default=scaffold.MODES[0],
    show_default=True,
    type=click.Choice(scaffold.MODES),
    help="How a generator is driven: by whole batches, step by step, so that requests can join, or "
    "as a runner under llmserve's engine, which only computes passes.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Parent folder of the package (default: the current one).",
)
def new(name: str, role: str, mode: str, output: Path) -> None:
    """Create a working package with code, tests and documentation.

    It prints the folder of the package, llmserve-NAME. Existing files are not overwritten.

    \b
    llmserve plugin new acme-words --role tokenizer
    llmserve plugin new acme-engine --role generator --mode step
    llmserve plugin new acme-model --role generator --mode runner
    llmserve plugin new acme-queue --role batching --output ~/src
    """
    folder = scaffold.new_package(name, role, output, mode=mode)
    click.echo(folder)
    path = quote(str(folder))
    lines = [
        f"install it:        {install_command(editable=f'{folder}[test]')}",
        f"run its tests:     (cd {path} && pytest)",
        {
            "command": f"run it:            llmserve {name} --help",
            "frontend": f"run it:            llmserve serve --frontend {name}",
        }.get(role, f"build with it:     llmserve build --plugin {name} --model demo"),
        f"what to change:    {quote(str(folder / 'README.md'))}",
    ]
    click.echo("\n".join(lines), err=True)
