"""How a stand-in says what it is: in Triton's log, and on ``/metrics`` for who measures it."""

from __future__ import annotations

from typing import Any

from llmserve.runtime.contract import STAND_IN_METRIC

_MEANING = "1 for a model whose backend is not there and is stood in for"


class Notice:
    """Says it once in the log, and on ``/metrics`` until it is closed."""

    def __init__(self, pb_utils: Any, model: str, instead_of: str, what: str) -> None:
        pb_utils.Logger.log_warn(
            f"{model}: this is llmserve's stand-in for {instead_of}, {what}; the real one has "
            "another speed"
        )
        self._kept: list[Any] = []
        try:
            family = pb_utils.MetricFamily(STAND_IN_METRIC, _MEANING, pb_utils.MetricFamily.GAUGE)
            metric = family.Metric(labels={"model": model, "instead_of": instead_of})
            metric.set(1)
        except Exception as error:
            # A server may be without metrics; the log says it then.
            pb_utils.Logger.log_info(f"{model}: no metric of the stand-in: {error}")
        else:
            self._kept = [metric, family]

    def close(self) -> None:
        """Take it back; a metric that outlived Triton's memory would crash the process."""
        self._kept.clear()
