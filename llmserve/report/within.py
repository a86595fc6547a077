"""What of a server's statistics says where time went and how large batches were."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.measure.runs import ModelFigures, Run
from llmserve.measure.table import part_name
from llmserve.report.plots.batches import Sizes
from llmserve.report.plots.server import Share


def shares(named: Sequence[tuple[str, Run]]) -> list[Share]:
    """Give where the time of requests went, by the models that were asked."""
    return [
        Share(name, run.server.models[0], _sent(run), len(run.server.models) > 1)
        for name, run in named
        if run.server and run.server.models
    ]


def every_share(run: Run) -> list[Share]:
    """Give the same for a model and each of its parts, by their own names."""
    models = run.server.models if run.server else ()
    return [
        Share(model.model, model, _sent(run), not at and len(models) > 1)
        for at, model in enumerate(models)
    ]


def sizes(named: Sequence[tuple[str, Run, int]]) -> list[Sizes]:
    """Give the sizes of models' batches, each in a colour of its own.

    An ensemble itself makes none: it is the part that batches most.
    """
    found = []
    for name, run, colour in named:
        models = run.server.models if run.server else ()
        if models:
            part = max(models[1:], key=_mean, default=models[0])
            own = part_name(part.model, models[0].model)
            called = f"{name}: {own}" if len(models) > 1 else name
            found.append(Sizes(called, part.batches, colour))
    return found


def _sent(run: Run) -> int:
    return len(run.records) + run.unfinished


def _mean(model: ModelFigures) -> float:
    return model.inferences / model.executions if model.executions else 0.0
