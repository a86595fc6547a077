"""One load against one subject: what ``llmserve bench`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from llmserve.client.model import ModelInfo
from llmserve.errors import UsageError
from llmserve.measure.crew import Crew
from llmserve.measure.figures import Observer, difference
from llmserve.measure.job import GIVE_UP, Ask, Job, Place, split
from llmserve.measure.machine import machine
from llmserve.measure.plan import Prompts, plan_requests
from llmserve.measure.runs import Load, Record, Run, Subject
from llmserve.measure.tokens import Counter, find_counter
from llmserve.measure.window import window_of

OnProgress = Callable[[int, float], None]
"""Called with how many requests are done and how many seconds have passed."""


def ignore(done: int, seconds: float) -> None:
    """Show no progress."""
    del done, seconds


@dataclass(frozen=True)
class Target:
    """A model that is served: where, and what is known of how it was built.

    ``repository`` is where its tokenizer may be read.
    """

    model: str
    place: Place
    name: str = ""
    repository: Path | None = None
    tokenizer: Path | None = None
    metrics_url: str | None = None
    http_url: str | None = None
    build: Mapping[str, Any] = field(default_factory=dict)
    server: str | None = None

    def counter(self) -> Counter:
        """Give what counts its tokens."""
        return find_counter(self.repository, self.model, self.tokenizer)

    def info(self) -> ModelInfo:
        """Ask the server how the model wants to be asked."""
        from llmserve.client import connect

        place = self.place
        with connect(
            place.url,
            tls=place.tls,
            root_certificates=place.root_certificates,
            headers=place.headers,
        ) as client:
            return client.model(self.model)


Asks = tuple[tuple[Ask, ...], tuple[Ask, ...]]
"""A warm-up and the requests after it."""


def bench(target: Target, load: Load, prompts: Prompts, *, on_progress: OnProgress = ignore) -> Run:
    """Measure a model under a load, and give every request with its times.

    >>> target = Target("demo", Place("127.0.0.1:8001"))
    >>> load = Load.closed(8, requests=98, stream=True)
    >>> bench(target, load, Prompts())  # doctest: +SKIP
    Run(...)
    """
    info = target.info()
    counter = target.counter()
    load = replace(load, dataset=prompts.describe(counter))
    asks = plan_requests(load, prompts, counter, ours=info.made_by_llmserve is not None)
    return run_load(target, info, load, asks, counter, on_progress=on_progress)


def run_load(
    target: Target,
    info: ModelInfo,
    load: Load,
    asks: Asks,
    counter: Counter,
    *,
    on_progress: OnProgress = ignore,
) -> Run:
    """Send requests that are settled already, and gather what came of them."""
    warmup, requests = asks
    if not requests:
        raise UsageError("there is nothing to send", mend="allow more requests or more time")
    check_askable(info, requests[0], load)
    job = Job(
        place=target.place,
        model=info,
        stream=load.stream,
        timeout=load.timeout,
        concurrency=load.concurrency,
        duration=load.duration if load.rate is None else None,
        total=len(requests),
        warmup=warmup,
        asks=requests,
        give_up=GIVE_UP,
    )
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    observer = Observer(target.place, target.model, target.metrics_url)
    try:
        cold = observer.look()
        with Crew(split(job, load.processes)) as crew:
            crew.warm_up()
            before = observer.look_after(cold, len(warmup))
            with observer.sampler() as sampler:
                noted = crew.run(on_progress)
            after = observer.look_after(before, len(noted.records))
    finally:
        observer.close()
    window = window_of(noted, job.duration)
    samples = sampler.between(noted.start, noted.start + window.seconds)
    return Run(
        subject=subject_of(target, info),
        load=load,
        started=started,
        seconds=window.seconds,
        records=_counted(window.records, noted.texts, counter),
        server=difference(before, after, samples),
        loader=noted.cost,
        unfinished=len(window.unfinished),
        interrupted=noted.interrupted,
        machine=machine(),
        unfinished_seconds=sum(window.unfinished),
        ended_early=noted.given_up,
    )


def check_askable(info: ModelInfo, ask: Ask, load: Load) -> None:
    """Build a request here first, so that what is wrong with it is one line and no process."""
    from llmserve.client.exchange import open_exchange

    open_exchange(info, [ask.prompt], ask.options, pieces=load.stream).next_round()


def _counted(
    records: Sequence[Record], texts: Mapping[int, Sequence[str]], counter: Counter
) -> tuple[Record, ...]:
    """Count the tokens that the model did not count, where its tokenizer is at hand."""
    if not counter.exact or not texts:
        return tuple(records)
    found = []
    for record in records:
        pieces = texts.get(record.index)
        if pieces:
            tokens = tuple(counter.count(text) if text else 0 for text in pieces)
            record = replace(record, tokens=tokens, output_tokens=sum(tokens))
        found.append(record)
    return tuple(found)


def subject_of(target: Target, info: ModelInfo) -> Subject:
    """Describe a target for a result."""
    return Subject(
        name=target.name or target.model,
        model=target.model,
        url=target.place.url,
        exchange=info.exchange,
        build=target.build,
        server=target.server,
    )
