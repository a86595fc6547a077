"""Models that are loaded on demand: a short form of the soak."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.live.servers import TIMEOUT, WORDS, Serving, figure, repository
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


def asked(serve: Serving, model: str, *, stream: bool = False) -> tuple[int, str, float]:
    """Return the status of a request, its answer, and what it says of when to ask again."""
    body = json.dumps({"model": model, "prompt": "30 0.1", "max_tokens": 8, "stream": stream})
    url = f"http://{serve.frontend[0]}/v1/completions"
    request = urllib.request.Request(url, body.encode())
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return response.status, response.read().decode(), 0.0
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), float(error.headers.get("retry-after", 0))


def test_a_model_that_dies_while_it_loads_costs_the_others_one_restart(tmp_path: Path) -> None:
    # Triton waits for it, but not for one that dies later, in its own code.
    dies = f"import os\nos.kill(os.getpid(), 9)\n{WORDS}"
    folder = repository(tmp_path / "models", words=WORDS, dies=dies)
    serve = Serving(str(folder), "--on-demand", "--pin", "words")
    try:
        with ThreadPoolExecutor() as pool:
            streams = [pool.submit(asked, serve, "words", stream=True) for _ in range(3)]
            first = asked(serve, "dies")
            ends = [stream.result() for stream in streams]
        assert (first[0], json.loads(first[1])["error"]["code"]) == (503, "model_not_loaded")
        # What runs gets to its end before Triton is restarted, or says why it does not.
        assert all(text.endswith("data: [DONE]\n\n") or '"error"' in text for _, text, _ in ends)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            began = time.monotonic()
            status, _, again = asked(serve, "dies")
            assert (status, again > 5) == (503, True), (again, serve.output)
            assert time.monotonic() - began < 2
            time.sleep(1)
        assert serve.output.count("triton: restarting") == 1
        assert asked(serve, "words")[0] == 200
    finally:
        serve.close()
