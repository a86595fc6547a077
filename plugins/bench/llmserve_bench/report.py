"""A report: one page that needs no other file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment

from llmserve.errors import UsageError
from llmserve_bench.plots import plots_of
from llmserve_bench.results import Result
from llmserve_bench.tables import conditions_of, notes_of, tables_of


def write_report(result: Result, folder: Path) -> Path:
    path = folder / "report.html"
    page = render_page(result)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write a report to {folder}: {error.strerror or error}") from None
    return path


def render_page(result: Result) -> str:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = files("llmserve_bench") / "templates" / "report.html.j2"
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        result=result,
        notes=notes_of(result),
        conditions=conditions_of(result),
        tables=tables_of(result),
        plots=plots_of(result),
    )
