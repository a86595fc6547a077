"""Tests of the notice of a stand-in, with and without metrics."""

from __future__ import annotations

from llmserve.testing import FakeBackendUtils
from llmserve_standins.notice import notice


def test_a_stand_in_logs_a_notice_even_without_metrics() -> None:
    class UtilsWithoutMetrics(FakeBackendUtils):
        def __init__(self) -> None:
            super().__init__()
            self.MetricFamily = self.refuse  # type: ignore[assignment]

        def refuse(self, *args: object) -> None:
            raise RuntimeError("metrics are off")

    for utils in (FakeBackendUtils(), UtilsWithoutMetrics()):
        notice(utils, "engine", "TensorRT-LLM", "PyTorch")
        assert len(utils.Logger.warnings) == 1
        assert "stand-in for TensorRT-LLM" in utils.Logger.warnings[0]
