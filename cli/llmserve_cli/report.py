"""``llmserve report``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("result", type=click.Path(path_type=Path), metavar="RESULT.json")
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("report"), show_default=True,
    metavar="DIR", help="The folder to write to; it is made if need be.",
)  # fmt: skip
def report(result: Path, output: Path) -> None:
    """Make the report of a measurement again, from what --json has saved.

    Prints the files: a page that opens from the disk, the same as Markdown, and its plots.

    \b
    llmserve bench demo --concurrency 8 --json run.json
    llmserve report run.json --output report
    """
    from llmserve.measure.results import load
    from llmserve.report import write

    for path in write(load(result), output):
        click.echo(str(path))
