"""A stand-in says what it is, with metrics and without."""

from __future__ import annotations

from llmserve.testing import FakeBackendUtils
from llmserve_standins.notice import notice


def test_a_stand_in_says_so_in_the_log_where_there_are_no_metrics() -> None:
    class Without(FakeBackendUtils):
        def __init__(self) -> None:
            super().__init__()
            self.MetricFamily = self.refused  # type: ignore[assignment]

        def refused(self, *given: object) -> None:
            raise RuntimeError("metrics are off")

    for utils in (FakeBackendUtils(), Without()):
        notice(utils, "engine", "TensorRT-LLM", "PyTorch")
        assert len(utils.Logger.warnings) == 1
        assert "stand-in for TensorRT-LLM" in utils.Logger.warnings[0]
