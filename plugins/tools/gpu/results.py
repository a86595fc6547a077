"""What the parts found: written line by line, so that an interrupted part loses nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

PROFILE = "profile.txt"
"""A longer table that a part may write."""


@dataclass(frozen=True)
class Row:
    """One finding. ``ok`` is None if there is nothing that it could miss."""

    what: str
    values: Mapping[str, str] = field(default_factory=dict)
    """By column."""
    ok: bool | None = None
    table: str = ""
    """The heading of the table; rows with the same columns belong together."""


class Results:
    """The rows of one part."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._table = ""

    def table(self, heading: str) -> None:
        """Begin a new table."""
        self._table = heading

    def add(self, what: str, ok: bool | None = None, /, **values: object) -> None:
        texts = {name.replace("_", " "): str(value) for name, value in values.items()}
        row = Row(what, texts, ok, self._table)
        print(f"  {what}: {', '.join(f'{k} {v}' for k, v in texts.items())}", flush=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Write a failure as a row, so that what follows in this part runs nevertheless."""
        started = time.monotonic()
        try:
            yield
        except Exception as error:
            message = " ".join(str(error).split())[:300]
            print(f"  {what} failed after {time.monotonic() - started:.0f} s", flush=True)
            self.add(what, False, failed=f"{type(error).__name__}: {message}")


def read(file: Path) -> list[Row]:
    if not file.exists():
        return []
    return [Row(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def markdown(rows: list[Row]) -> str:
    """Return the rows as tables, a new one where the heading changes."""
    lines: list[str] = []
    columns: list[str] = []
    heading: str | None = None
    for row in rows:
        if row.table != heading:
            heading = row.table
            # Failures have a column that no other row has; it comes last.
            names = [name for other in rows if other.table == heading for name in other.values]
            columns = sorted(dict.fromkeys(names), key=lambda name: name == "failed")
            lines += ["", f"### {heading}", ""] if heading else [""]
            lines.append(f"| | {' | '.join(columns)} | |")
            lines.append("|---" * (len(columns) + 2) + "|")
        verdict = {None: "", True: "ok", False: "**no**"}[row.ok]
        cells = [row.values.get(name, "").replace("|", "\\|") for name in columns]
        lines.append(f"| {row.what} | {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines)
