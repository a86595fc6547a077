"""What a report says, before it becomes HTML or Markdown: both are made of the same parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """Rows of text; all columns hold figures but those that ``words`` names. What only few will
    want to see is ``folded`` away."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[int] = frozenset({0})
    folded: bool = False


@dataclass(frozen=True)
class Figure:
    """A plot: ``alt`` tells what it shows to who cannot see it, ``table`` has its figures.

    ``narrow`` is the same plot for a narrow screen, where shrinking would not do.
    """

    name: str
    title: str
    caption: str
    alt: str
    svg: str
    table: Table | None = None
    narrow: str | None = None


@dataclass(frozen=True)
class Section:
    """Figures and tables under a heading."""

    title: str
    text: str = ""
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Page:
    """A whole report. ``facts`` are the conditions it holds under, ``warnings`` the reasons to
    doubt it, ``findings`` what the figures say in words."""

    title: str
    kind: str
    findings: tuple[str, ...]
    warnings: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]


@dataclass
class Draft:
    """Sections as they are put together; what has nothing to show is left out."""

    sections: list[Section] = field(default_factory=list)

    def add(
        self,
        title: str,
        text: str = "",
        figures: Sequence[Figure | None] = (),
        tables: Sequence[Table | None] = (),
    ) -> None:
        """Add a section if there is anything in it."""
        shown = tuple(figure for figure in figures if figure)
        listed = tuple(table for table in tables if table and table.rows)
        if shown or listed:
            self.sections.append(Section(title, text, shown, listed))
