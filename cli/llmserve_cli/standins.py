"""Which models a server answers with a stand-in, as the stand-ins themselves say."""

from __future__ import annotations


def stand_ins(metrics_url: str) -> list[str]:
    """Say it, a line for each backend; nothing where the server publishes no metrics."""
    from llmserve.measure.published import fetch
    from llmserve.measure.standins import lines, told_on

    return lines(told_on(fetch(metrics_url) or ""))
