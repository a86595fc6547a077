"""The command ``llmserve sizes``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click


@click.command()
@click.argument("repository", type=click.Path(path_type=Path), default=Path("model_repository"))
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects, sizes in bytes.")
def sizes(repository: Path, as_json: bool) -> None:
    """Print the sizes of a repository's models.

    \b
    llmserve sizes model_repository
    """
    from llmserve_sizes.survey import survey

    models = survey(repository)
    if as_json:
        import json
        from dataclasses import asdict

        click.echo(json.dumps([asdict(model) for model in models], indent=2))
        return
    rows = [["MODEL", "SIZE", "RECIPE", "WEIGHTS", "PACKAGES"]]
    for model in models:
        packages = ", ".join(f"{name} {version}" for name, version in model.packages.items())
        rows.append(
            [model.name, readable(model.bytes), model.recipe, model.weights, packages or "-"]
        )
    rows.append(["total", readable(sum(model.bytes for model in models)), "", "", ""])
    for line in _aligned(rows):
        click.echo(line.rstrip())
    for model in models:
        if model.problem:
            click.echo(f"{model.name}: {model.problem}", err=True)


def readable(size: float) -> str:
    """Format a size for people.

    >>> readable(999), readable(1_490_000)
    ('999 B', '1.5 MB')
    """
    if size < 1000:
        return f"{size:.0f} B"
    units = iter(("kB", "MB", "GB", "TB"))
    size, unit = size / 1000, next(units)
    # No repository is larger than the last unit.
    while size >= 1000:
        size, unit = size / 1000, next(units)
    return f"{size:.1f} {unit}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)) for row in rows]
