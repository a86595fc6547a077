"""Reports of measurements: Markdown, and one HTML file that needs no network and no script.

>>> from llmserve.measure.results import load
>>> from llmserve.report import write
>>> write(load(Path("result.json")), Path("report"))  # doctest: +SKIP
[PosixPath('report/report.html'), PosixPath('report/report.md'), PosixPath('report/latency.svg')]

The same result gives the same bytes with the same matplotlib. Everything that comes from outside
(names, options, messages) is escaped in each of the forms.
"""

from __future__ import annotations

from pathlib import Path

from llmserve.measure.results import Comparison, Result, Run
from llmserve.report.needs import require
from llmserve.report.page import Page

__all__ = ["page", "require", "write"]


def page(result: Result) -> Page:
    """Work out what the report of a result says."""
    if isinstance(result, Run):
        from llmserve.report.run import run_page

        return run_page(result)
    if isinstance(result, Comparison):
        from llmserve.report.comparison import comparison_page

        return comparison_page(result)
    from llmserve.report.sweep import sweep_page

    return sweep_page(result)


def write(result: Result, folder: Path) -> list[Path]:
    """Write the report of a result into a folder, which is made if need be.

    Gives the files: ``report.html`` stands alone, ``report.md`` shows the plots beside it.
    """
    require()
    from llmserve.report.files import write_all
    from llmserve.report.html import render_html
    from llmserve.report.markdown import render_markdown
    from llmserve.report.svg import standalone

    made = page(result)
    content = {"report.html": render_html(made), "report.md": render_markdown(made)}
    for section in made.sections:
        for figure in section.figures:
            content[f"{figure.name}.svg"] = standalone(figure.svg)
    return write_all(folder, content)
