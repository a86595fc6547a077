"""How a stand-in says what it is: in Triton's log, and on ``/metrics`` for who measures it."""

from __future__ import annotations

import os
from typing import Any

from llmserve.runtime.contract import STAND_IN_METRIC

_MEANING = "1 for a model whose backend is not there and is stood in for"


def notice(pb_utils: Any, model: str, instead_of: str, what: str) -> list[Any]:
    """Return what to drop when the model goes: a metric that is left would crash the process."""
    pb_utils.Logger.log_warn(
        f"{model}: this is llmserve's stand-in for {instead_of}, {what}; the real one has "
        "another speed"
    )
    try:
        family = pb_utils.MetricFamily(STAND_IN_METRIC, _MEANING, pb_utils.MetricFamily.GAUGE)
        # Of two with the same labels Triton drops both when one goes, as when a model is reloaded.
        labels = {"model": model, "instead_of": instead_of, "process": str(os.getpid())}
        metric = family.Metric(labels=labels)
        metric.set(1)
    except Exception as error:
        # A server may be without metrics; the log says it then.
        pb_utils.Logger.log_info(f"{model}: no metric of the stand-in: {error}")
        return []
    return [metric, family]
