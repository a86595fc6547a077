"""Models that are loaded on demand: a short form of the soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.servers import figure
from tests.reliability.on_demand import soak, words

pytestmark = pytest.mark.long

PLACE = 2
SECONDS = 15.0
MEMORY = 300e6
"""Far more than the models take, which have no weights."""


def test_more_models_than_places_are_served_without_an_error(tmp_path: Path) -> None:
    outcome = soak(words(tmp_path, 4), PLACE, SECONDS, clients=8, memory=MEMORY)
    assert outcome.problems == [], outcome
    assert outcome.counts["answered"] > 8
    assert outcome.counts["refused, of the broken model"] > 0
    figure("models on demand: answered requests", outcome.counts["answered"], "")
    figure("models on demand: loaded", sum(map(len, outcome.loads.values())), " times")
    slowest = max(outcome.seconds)
    figure("models on demand: the longest wait", slowest)
