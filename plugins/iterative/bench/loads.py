"""In-flight batching against static, on requests of mixed lengths that arrive at random."""

from __future__ import annotations

from collections.abc import Iterator

from rounds import Line, Skipped, Target
from served import Load, Passage, run
from stage import Stage

PLACES = 32
TUTORIAL = 8


def in_flight_against_static(stage: Stage) -> Iterator[Line | Skipped]:
    """Requests a second and the time to the first token; the same build but for batching.

    Requests arrive as fast as in-flight batching can just serve them, which it is asked first;
    static batching cannot keep up with that.
    """
    requests = 32 if stage.wishes.quick else 128
    in_flight = stage.build("iterative", PLACES)
    url, texts = stage.triton.server.grpc_url, stage.prompts.texts
    at_once = Load.poisson(requests, 1e6, seed=0)
    run(url, in_flight, at_once, texts(requests))
    # Where static batches can keep up as well, there is nothing to compare: the better of two.
    pace = max(run(url, in_flight, at_once, texts(requests)).per_second for _ in range(2))
    for places in (TUTORIAL, PLACES):
        static = stage.build("static", places)
        run(url, static, Load.poisson(places, 1e6, seed=1), texts(places))
        ours: list[Passage] = []
        theirs: list[Passage] = []
        for turn in range(stage.wishes.rounds):
            load = Load.poisson(requests, pace, seed=turn)
            ours.append(run(url, in_flight, load, texts(requests)))
            theirs.append(run(url, static, load, texts(requests)))
        label = f"in-flight against static batches of {places}, {pace:.1f} arrivals/s"
        rates = [p.per_second for p in ours], [p.per_second for p in theirs]
        yield Line(label, "requests/s", *rates, Target(2.5))
        waits = [p.first_token * 1e3 for p in ours], [p.first_token * 1e3 for p in theirs]
        label = f"the same, median time to the first token, batches of {places}"
        yield Line(label, "ms", *waits, Target(0.2, at_least=False))
