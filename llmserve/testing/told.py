"""What a model tells its server beside its answers: the log and metrics, kept."""

from __future__ import annotations

from collections.abc import Mapping


class FakeLogger:
    """Triton's log, kept."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.infos: list[str] = []

    def log_error(self, message: str) -> None:
        """Keep an error."""
        self.errors.append(message)

    def log_warn(self, message: str) -> None:
        """Keep a warning."""
        self.warnings.append(message)

    def log_info(self, message: str) -> None:
        """Keep what is said without need."""
        self.infos.append(message)

    log_verbose = log_info


class FakeMetric:
    """A metric, with its value."""

    def __init__(self) -> None:
        self.value = 0.0

    def increment(self, amount: float) -> None:
        """Add to the value."""
        self.value += amount

    def set(self, value: float) -> None:
        """Set the value."""
        self.value = value


class FakeMetricFamily:
    """A family that keeps the last metric made of it."""

    COUNTER = 0
    GAUGE = 1

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.description, self.kind = name, description, kind
        self.metric = FakeMetric()

    def Metric(self, labels: Mapping[str, str]) -> FakeMetric:
        """Make a metric."""
        del labels
        return self.metric
