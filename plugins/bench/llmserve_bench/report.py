"""Reports: one self-contained page, and the same as Markdown with its plots beside it."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from llmserve.errors import UsageError
from llmserve_bench.plots import Plot, plots_of
from llmserve_bench.results import Result
from llmserve_bench.tables import Table, facts_of, notes_of, tables_of

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~])")


def write_report(result: Result, folder: Path) -> list[Path]:
    """Write a report into a folder and name its files, the page first."""
    plots = plots_of(result)
    contents = {
        "report.html": render_page(result, plots),
        "report.md": render_markdown(result, plots),
        **{f"{plot.name}.svg": plot.svg for plot in plots},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write a report to {folder}: {error.strerror or error}") from None
    return [folder / name for name in contents]


def render_page(result: Result, plots: list[Plot]) -> str:
    """Make the page; it loads nothing from anywhere."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = files("llmserve_bench") / "templates" / "report.html.j2"
    tables = tables_of(result)
    # The tables that answer the question, the plots, then the rest.
    first = len(result.loads) if result.kind == "compare" else 1
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        result=result,
        notes=notes_of(result),
        facts=facts_of(result),
        answers=tables[:first],
        tables=tables[first:],
        plots=[(plot, Markup(plot.inline)) for plot in plots],  # noqa: S704
    )


def render_markdown(result: Result, plots: list[Plot]) -> str:
    """Make the Markdown, which shows the plots that lie beside it."""
    lines = [f"# {_plain(result.title)}", "", f"`llmserve {result.kind}`", ""]
    lines += [f"> {_plain(note)}\n" for note in notes_of(result)]
    for table in tables_of(result):
        lines += [f"## {_plain(table.title)}", "", *_table(table), ""]
    for plot in plots:
        title = _plain(plot.title)
        lines += [f"## {title}", "", f"![{title}]({plot.name}.svg)", "", _plain(plot.caption), ""]
    facts = [f"- {name}: {_plain(value)}" for name, value in facts_of(result).items()]
    return "\n".join([*lines, "## Conditions", "", *facts]) + "\n"


def _table(table: Table) -> list[str]:
    marks = [":--" if table.is_text(at) else "--:" for at in range(len(table.columns))]
    rows = [[_plain(cell) for cell in row] for row in (table.columns, *table.rows)]
    return [f"| {' | '.join(row)} |" for row in (rows[0], marks, *rows[1:])]


def _plain(text: str) -> str:
    """Keep names and messages of others from becoming markup."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
