"""A report as Markdown, as GitHub and others show it, with the plots as files beside it."""

from __future__ import annotations

import html
import re

from llmserve.report.page import Figure, Page, Table

_MARKS = re.compile(r"([\\`*\[\]<>&|~#$])|(?<![A-Za-z0-9])(_)|(_)(?![A-Za-z0-9])|(:)(?=//)|(@)")
_START = re.compile(r"^(\d*)([-+=]|(?<=\d)[.)](?=\s|$))")


def render_markdown(page: Page) -> str:
    """Write a page as Markdown."""
    blocks = [f"# {escape(page.title)}"]
    blocks += [f"> **Careful.** {escape(warning)}" for warning in page.warnings]
    if page.findings:
        blocks.append("\n".join(f"- {block(finding)}" for finding in page.findings))
    facts = Table("", ("Conditions", ""), page.facts, frozenset({0, 1}))
    blocks.append(_rows(facts))
    for section in page.sections:
        blocks.append(f"## {escape(section.title)}")
        if section.text:
            blocks.append(block(section.text))
        for figure in section.figures:
            blocks += _figure(figure)
        for table in section.tables:
            if table.folded:
                blocks += _folded(html.escape(table.title), table)
            else:
                blocks += [f"**{escape(table.title)}**", _rows(table)]
    return "\n\n".join(blocks) + "\n"


def escape(text: str) -> str:
    r"""Take their meaning from all characters that have one.

    >>> print(escape("<b> *x* max_batch_size _y_ | http://z"))
    \<b\> \*x\* max_batch_size \_y\_ \| http\://z
    """
    return _MARKS.sub(lambda found: f"\\{found[0]}", " ".join(text.split()))


def block(text: str) -> str:
    r"""Do the same at the start of a line, where more characters have a meaning.

    >>> print(block("1. x"), block("- x"), block("1.27 s"))
    1\. x \- x 1.27 s
    """
    return _START.sub(r"\1\\\2", escape(text))


def _figure(figure: Figure) -> list[str]:
    blocks = [f"### {escape(figure.title)}", f"![{escape(figure.alt)}]({figure.name}.svg)"]
    if figure.caption:
        blocks.append(block(figure.caption))
    if figure.table:
        blocks += _folded("The figures of this plot", figure.table)
    return blocks


def _folded(title: str, table: Table) -> list[str]:
    # Markdown inside of an element needs the empty lines around it.
    return [f"<details><summary>{title}</summary>", _rows(table), "</details>"]


def _rows(table: Table) -> str:
    lines = [_row(table.columns), _row(tuple(
        "---" if at in table.words else "---:" for at in range(len(table.columns))
    ), plain=True)]  # fmt: skip
    lines += [_row(row) for row in table.rows]
    return "\n".join(lines)


def _row(cells: tuple[str, ...], *, plain: bool = False) -> str:
    return f"| {' | '.join(cell if plain else escape(cell) for cell in cells)} |"
