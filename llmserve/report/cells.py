"""The runs of a comparison by subject and load."""

from __future__ import annotations

from llmserve.measure.runs import Load, Run
from llmserve.measure.series import Comparison, Ratio
from llmserve.measure.summary import summarize

Named = list[tuple[str, Run]]


class Cells:
    """Finds the runs of a comparison; ``names`` are its subjects, ``main`` its heaviest load:
    there subjects differ most."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.names = [subject.name for subject in comparison.subjects]
        self._runs = {(cell.subject, cell.load): cell.runs for cell in comparison.cells}
        self.all = [run for cell in comparison.cells for run in cell.runs]
        self._known = {run.load.label: run.load for run in self.all}
        measured = [label for label in comparison.loads if label in self._known]
        self.main = max(measured, key=self.height, default="")

    def of(self, name: str, load: str) -> tuple[Run, ...]:
        """Give the runs of a subject under a load."""
        return self._runs.get((name, load), ())

    def loads(self) -> list[Load]:
        """Give the loads that were measured, in their order."""
        return [self._known[label] for label in self.labels()]

    def labels(self) -> list[str]:
        """Give their labels, from the lightest to the heaviest."""
        measured = [label for label in self.comparison.loads if label in self._known]
        return sorted(measured, key=self.height)

    def height(self, label: str) -> float:
        """Give a load as a number."""
        load = self._known[label]
        return float(load.concurrency or load.rate or 0)

    def typical(self, name: str, load: str) -> Run | None:
        """Give the round whose rate is in the middle."""
        order = sorted(self.of(name, load), key=lambda run: summarize(run).requests_per_second)
        return order[(len(order) - 1) // 2] if order else None

    def ratios(self, name: str, load: str) -> list[Ratio]:
        """Give the ratios of a subject to the first one."""
        return [
            row
            for row in self.comparison.ratios
            if (row.subject, row.load, row.against) == (name, load, self.names[0])
        ]

    def every(self) -> Named:
        """Give all runs with what to call them."""
        return [
            (self._called(name, label), run)
            for label in self.labels()
            for name in self.names
            for run in self.of(name, label)
        ]

    def middles(self) -> Named:
        """Give one run for each subject and load, the round in the middle."""
        return [
            (self._called(name, label), run)
            for label in self.labels()
            for name in self.names
            if (run := self.typical(name, label))
        ]

    def _called(self, name: str, label: str) -> str:
        return f"{name}, {label}" if len(self.comparison.loads) > 1 else name
