"""The notice that a model is served by a stand-in, in Triton's log and on ``/metrics``."""

from __future__ import annotations

import os
from typing import Any

from llmserve.runtime.contract import STAND_IN_METRIC

_HELP = "1 for a model that is served by a stand-in for its missing backend"


def notice(pb_utils: Any, model: str, instead_of: str, what: str) -> list[Any]:
    """Publish the notice; an unload without releasing the returned metric crashes the process."""
    pb_utils.Logger.log_warn(
        f"{model}: this is llmserve's stand-in for {instead_of}, {what}; its speed differs from "
        "that of the real backend"
    )
    try:
        family = pb_utils.MetricFamily(STAND_IN_METRIC, _HELP, pb_utils.MetricFamily.GAUGE)
        # If one of two metrics with the same labels is released, as on a reload, Triton drops both.
        labels = {"model": model, "instead_of": instead_of, "process": str(os.getpid())}
        metric = family.Metric(labels=labels)
        metric.set(1)
    except Exception as error:
        # If the server has no metrics, the notice in the log must suffice.
        pb_utils.Logger.log_info(f"{model}: no metric for the stand-in: {error}")
        return []
    return [metric, family]
